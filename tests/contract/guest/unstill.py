"""A program that cannot be frozen in time: one of its threads is in the middle of a system call that ends when it is told to.

``python3 -c UNSTILL FILE`` has a page of memory that nobody has filled, as far as the kernel is concerned (userfaultfd(2)), and a
thread that writes it into a pipe. The kernel's copy waits for the page, a signal does not end it, and the freezer waits for the
thread to leave the kernel. It prints ``waits`` when the thread does; when FILE is there it fills the page, and prints how many
bytes came out of the pipe. It needs to be root, like all who may let the kernel wait for them.
"""

from __future__ import annotations

UNSTILL = r"""
import ctypes, fcntl, mmap, os, struct, sys, threading, time

SIZE = mmap.PAGESIZE
USERFAULTFD, UFFD_API, API, REGISTER, ZEROPAGE = 323, 0xAA, 0xC018AA3F, 0xC020AA00, 0xC020AA04
libc = ctypes.CDLL(None, use_errno=True)
faults = libc.syscall(USERFAULTFD, os.O_CLOEXEC)
if faults < 0:
    print("cannot:", os.strerror(ctypes.get_errno()), flush=True)
    sys.exit(1)

def ask(request, *words):
    fcntl.ioctl(faults, request, bytearray(struct.pack(f"{len(words)}Q", *words)))

ask(API, UFFD_API, 0, 0)
page = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
ask(REGISTER, address, SIZE, 1, 0)
out, into = os.pipe()
threading.Thread(target=os.write, args=(into, page)).start()
os.read(faults, 32)  # the kernel says that somebody waits
print("waits", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
ask(ZEROPAGE, address, SIZE, 0, 0)
print(len(os.read(out, SIZE)), flush=True)
"""
