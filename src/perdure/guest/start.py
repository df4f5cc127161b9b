"""What init starts: puts our own sources on the path (``-I -S`` leaves nothing else there) and runs the agent."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from perdure.guest.agent import main

main(sys.argv[1:])
