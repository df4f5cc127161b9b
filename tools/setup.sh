#!/usr/bin/env bash
# Prepare this checkout: tools/setup.sh [STAGE...], all idempotent, all quick when nothing is to be done.
#
#   system   Debian packages that the machines, the image build and the tests need
#   venv     .venv at the repository root: a Python >= 3.11, the locked packages with their hashes, this project editable
#   qemu10   a second QEMU (10.x) for the machine suite, unpacked into the user's cache; a host that has 10.x already needs none
#   image    the image 'base' and its golden snapshot, in the image cache
#
# Without arguments: system venv image. Where rights are missing it prints the command to run and exits 1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STAMPS=.venv/.setup
PACKAGES=(qemu-system-x86 qemu-utils mmdebstrap bubblewrap e2fsprogs zstd xz-utils cpio git ca-certificates debian-archive-keyring)
# mmdebstrap without root maps user ids, which needs these set-uid helpers.
[ "$(id -u)" = 0 ] || PACKAGES+=(uidmap)

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# The names among "$@" that dpkg does not have installed.
missing_packages() {
    local have
    have=$(dpkg-query -W -f='${Package} ${db:Status-Status}\n' "$@" 2>/dev/null || true)
    for name in "$@"; do
        grep -qx "$name installed" <<<"$have" || echo "$name"
    done
}

# Install Debian packages as root or by sudo; otherwise say what somebody with the rights must run.
apt_install() {
    local -a as_root=() apt=(env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
    local by_hand="apt-get update && apt-get install -y --no-install-recommends $*"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || die "these packages are missing and installing them needs root: $*" \
            "run this, then try again:  sudo sh -c '$by_hand'"
        as_root=(sudo -n)
    fi
    say "installing $*"
    local log
    log=$(mktemp)
    # The package lists may be absent or name versions that are gone: only then are they fetched.
    if ! "${as_root[@]}" "${apt[@]}" install -y --no-install-recommends "$@" >"$log" 2>&1; then
        if ! { "${as_root[@]}" "${apt[@]}" update && "${as_root[@]}" "${apt[@]}" install -y --no-install-recommends "$@"; } >"$log" 2>&1; then
            tail -n 20 "$log" >&2
            rm -f "$log"
            die "apt could not install: $*" "the end of its output is above; mend that, or run by hand as root:  $by_hand"
        fi
    fi
    rm -f "$log"
}

stage_system() {
    if ! command -v dpkg-query >/dev/null; then
        local tool absent=()
        for tool in qemu-system-x86_64 qemu-img mmdebstrap bwrap mkfs.ext4 zstd xz cpio git; do
            command -v "$tool" >/dev/null || absent+=("$tool")
        done
        [ ${#absent[@]} = 0 ] || die "this is not a Debian-like system, so install these commands yourself: ${absent[*]}"
        return
    fi
    local missing
    mapfile -t missing < <(missing_packages "${PACKAGES[@]}")
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

# The first Python that is new enough; a name may be a shim that starts nothing, so each is run.
find_python() {
    local name
    for name in ${PERDURE_SETUP_PYTHON:-} python3 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "no Python 3.11 or newer was found (tried python3, python3.13, python3.12, python3.11)" \
        "install one, or name it:  make setup PERDURE_SETUP_PYTHON=/path/to/python3"
}

make_venv() {
    local python
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        # Debian's own Python keeps ensurepip in a package of its own.
        command -v apt-get >/dev/null || die "$python has no ensurepip module; install the venv package of your system's Python"
        apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    fi
    say "making .venv with $python"
    rm -rf .venv
    "$python" -m venv .venv
}

# The lock's own entry for uv, so that the installer is pinned where everything is pinned.
uv_requirement() { awk '/^uv==/ {on = 1; print; next} on && /--hash/ {print; next} {on = 0}' requirements.lock; }

stage_venv() {
    local stamp
    # What concerns the environment comes before the tables of the tools.
    stamp=$(sed '/^\[tool\./,$d' pyproject.toml | cat - requirements.lock tools/setup.sh | sha256sum | cut -c1-32)-$PWD
    [ "$(cat "$STAMPS/venv" 2>/dev/null)" = "$stamp" ] && [ -x .venv/bin/perdure ] && .venv/bin/python -c '' 2>/dev/null && return
    .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || make_venv
    local version
    version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' requirements.lock)
    if [[ $(.venv/bin/uv --version 2>/dev/null) != "uv $version"* ]]; then
        .venv/bin/python -m ensurepip >/dev/null
        .venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes --only-binary :all: -r <(uv_requirement)
    fi
    say "installing the locked packages"
    .venv/bin/uv pip sync -q --compile-bytecode --python .venv/bin/python --require-hashes requirements.lock
    .venv/bin/uv pip install -q --python .venv/bin/python --no-deps --no-build-isolation -e .
    mkdir -p "$STAMPS"
    printf '%s\n' "$stamp" >"$STAMPS/venv"
}

stage_qemu10() {
    [ -x tools/fetch-qemu10.sh ] || return 0
    # The suite runs on the system's QEMU in any case; without the mirror's backports it runs on that one alone.
    tools/fetch-qemu10.sh >/dev/null || say "no second QEMU could be fetched; the machine suite runs on the system's QEMU only"
}

stage_image() {
    local home images digest stamp
    home=${PERDURE_HOME:-$([ "$(id -u)" = 0 ] && echo /var/lib/perdure || echo "${XDG_DATA_HOME:-$HOME/.local/share}/perdure")}
    images=${PERDURE_IMAGE_DIR:-$home/images}
    digest=$(cat "$images/names/base" 2>/dev/null || true)
    stamp=$(find src/perdure/images src/perdure/guest src/perdure/wire/guest* -type f -not -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-32)
    stamp+=" $images $digest"
    [ -n "$digest" ] && [ -f "$images/blobs/$digest/image.json" ] && [ "$(cat "$STAMPS/image" 2>/dev/null)" = "$stamp" ] && return
    say "making sure that the image 'base' is built (a first build takes a few minutes)"
    .venv/bin/perdure image build --if-missing >&2
    mkdir -p "$STAMPS"
    printf '%s\n' "${stamp% *} $(cat "$images/names/base")" >"$STAMPS/image"
}

[ $# -gt 0 ] || set -- system venv image
for stage in "$@"; do
    case $stage in
        system | venv | qemu10 | image) "stage_$stage" ;;
        *) die "there is no stage '$stage'; the stages are: system venv qemu10 image" ;;
    esac
done
