"""What is read of predicted rows beside their tokens.

A reader is a file, with its check, its device part and its result; `base.Reader` is the protocol. A request brings
readers (`Request.readers`), and `own.readers_of` adds those that follow from its sampling parameters, its template and
its cache policy.
"""
