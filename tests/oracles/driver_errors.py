"""Errors of a driver, with a status of our choice."""

import pyopencl as cl


class Failure(cl.LogicError):
    """A driver's error; status: the name of its code."""

    def __init__(self, status):
        Exception.__init__(self)
        self.status = status

    @property
    def code(self):
        return getattr(cl.status_code, self.status)

    def __str__(self):
        return "clDoSomething failed"
