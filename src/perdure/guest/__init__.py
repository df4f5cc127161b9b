"""The agent: our code inside a workspace. Standard library only; it runs on the agent disk's own Python, never on the user's.

Layout on the agent disk (copy these sources, compiled, nothing else of the package is imported)::

    /opt/perdure/perdure/__init__.py
    /opt/perdure/perdure/guest/*.py
    /opt/perdure/perdure/wire/__init__.py
    /opt/perdure/perdure/wire/guest/*.py

Started and respawned by init, as root, in the root PID and mount namespace, with ``oom_score_adj`` -1000::

    /usr/bin/python3 -I -S /opt/perdure/perdure/guest/start.py

``start.py`` puts ``/opt/perdure`` on ``sys.path`` itself. Every default is right inside a workspace; the options exist for tests
(``start.py --help`` lists them). Exit status is never 0: init should start it again at once.

What it expects of init:

* ``/proc``, ``/sys``, ``/dev`` (devtmpfs), ``/run`` (tmpfs) mounted; ``lo`` up (IPv4 and IPv6);
* cgroup2 at ``/sys/fs/cgroup`` with ``-o nsdelegate``, or users can leave their groups, and best with ``-o favordynmods``
  (starting a command moves no process, but users' own tools may);
* the user's disk at ``/user`` with ``/user/{sys,dev,dev/pts,dev/shm,tmp,run}`` mounted. ``/user/proc`` and
  ``/user/sys/fs/cgroup`` are the agent's to mount, as the users' own namespaces show them. When the disk could not be mounted,
  init still starts the agent and puts one sentence into ``/run/perdure/root-problem``; the hello carries it to the host;
* ``resize2fs`` in the agent disk's PATH (``/usr/sbin`` or ``/sbin``), for ``grow_disk``;
* the channels are found through ``/sys/class/virtio-ports/*/name``, so no udev is needed; ``/dev/random`` for reseeding.

Standard library modules used: _queue, _sha2, _thread, collections, ctypes, errno, fcntl, gc, heapq, json (and with it re, enum,
functools, ...), math, os, re, select, signal, socket, stat, struct, sys, time, typing, zlib.
No asyncio, threading, subprocess, argparse or logging.
"""
