"""Words for error messages: what a wrong argument is, and the first line of a long error."""


def describe(thing: object) -> str:
    """A wrong argument, as an error message names it.

    >>> describe(dict), describe(0.1)
    ('the class dict', 'an object of type float')
    """
    return f"the class {thing.__name__}" if isinstance(thing, type) else f"an object of type {type(thing).__name__}"


def one_line(error: BaseException) -> str:
    """The first line of an error's text, without the pages that torch adds.

    >>> one_line(ValueError("no\\nand a trace")), one_line(MemoryError())
    ('no', 'MemoryError')
    """
    return str(error).strip().partition("\n")[0] or type(error).__name__
