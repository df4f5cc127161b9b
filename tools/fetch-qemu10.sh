#!/usr/bin/env bash
# Fetch QEMU 10 from Debian's backports into a cache directory, beside the system's own QEMU, for the machine tests.
#
# usage: tools/fetch-qemu10.sh [DIRECTORY]
# default: /var/cache/perdure/qemu10 for root (an unprivileged VMM must be able to read it), else the user's cache
#
# Nothing is installed: a private apt configuration resolves the package against what the host has, the .deb files
# are downloaded and unpacked, and DIRECTORY/bin/qemu-system-x86_64 starts the result. The mirror and its key are the
# host's own. Prints the path of the binary; does nothing when it is there already.
set -euo pipefail

if [[ $EUID == 0 ]]; then cache=/var/cache; else cache=${XDG_CACHE_HOME:-$HOME/.cache}; fi
target=${1:-$cache/perdure/qemu10}
binary=$target/bin/qemu-system-x86_64
suite=bookworm-backports

if [[ -x $binary ]]; then
    echo "$binary"
    exit 0
fi

. /etc/os-release
if [[ ${VERSION_CODENAME:-} != bookworm ]]; then
    # Newer releases ship QEMU 10 or later themselves: there is no second version to test.
    echo "fetch-qemu10: this host is not Debian 12; the machine tests use its own QEMU only" >&2
    exit 0
fi

list_index() { apt-get indextargets --format '$(REPO_URI)|$(CODENAME)|$(COMPONENT)' 'Created-By: Packages'; }
mirror=$(list_index 2>/dev/null | awk -F'|' '$2 == "bookworm" && $3 == "main" {print $1; exit}')
if [[ -z $mirror ]]; then
    # No index downloaded yet: read the sources themselves, both formats.
    mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
        awk '$1 == "deb" {for (i = 2; i < NF; i++) if ($(i + 1) == "bookworm") {print $i; exit}}')
fi
if [[ -z $mirror ]]; then
    mirror=$(cat /etc/apt/sources.list.d/*.sources 2>/dev/null |
        awk '/^URIs:/ {uri = $2} /^Suites:/ && / bookworm( |$)/ {print uri; exit}')
fi
if [[ -z $mirror ]]; then
    echo "fetch-qemu10: found no Debian mirror in the host's apt sources; add one for bookworm main" >&2
    exit 1
fi

mkdir -p "$(dirname "$target")"
exec 9>"$target.lock"
flock 9
if [[ -x $binary ]]; then
    echo "$binary"
    exit 0
fi

work=$(mktemp -d "$target.tmp.XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/apt/{etc/sources.list.d,etc/preferences.d,etc/apt.conf.d,state/lists/partial,cache/archives/partial} "$work/root"
for name in "$suite" bookworm; do
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $name main"
done >"$work/apt/etc/sources.list"
# Without this an unprivileged sandbox user could not read a private directory.
options=(
    -o Dir::Etc::sourcelist="$work/apt/etc/sources.list" -o Dir::Etc::sourceparts="$work/apt/etc/sources.list.d"
    -o Dir::Etc::preferencesparts="$work/apt/etc/preferences.d" -o Dir::Etc::preferences=/dev/null
    -o Dir::State="$work/apt/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$work/apt/cache"
    -o APT::Sandbox::User=root -o Debug::NoLocking=1 -o Acquire::Retries=3 -q
)
apt-get "${options[@]}" update >&2
apt-get "${options[@]}" install --download-only --yes --no-install-recommends --reinstall \
    -t "$suite" qemu-system-x86 >&2
for deb in "$work"/apt/cache/archives/*.deb; do
    dpkg-deb -x "$deb" "$work/root"
done
rm -rf "$work/apt"
mkdir -p "$work/bin"
cat >"$work/bin/qemu-system-x86_64" <<'WRAPPER'
#!/bin/sh
# QEMU finds its data and modules beside its binary; its newer libraries are beside it too.
root=${0%/bin/*}/root
export LD_LIBRARY_PATH="$root/usr/lib/x86_64-linux-gnu:$root/lib/x86_64-linux-gnu"
exec "$root/usr/bin/qemu-system-x86_64" "$@"
WRAPPER
chmod 0755 "$work/bin/qemu-system-x86_64" "$work"
"$work/bin/qemu-system-x86_64" --version >&2
rm -rf "$target"
mv "$work" "$target"
trap - EXIT
echo "$binary"
