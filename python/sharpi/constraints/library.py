"""llguidance, which only constraints by grammars need."""

from __future__ import annotations

from types import ModuleType

from sharpi.errors import InvalidRequestError

__all__ = ["llguidance", "parser_limits"]


def llguidance() -> ModuleType:
    """The library. Raises InvalidRequestError if it is not installed."""
    try:
        import llguidance as library
    except ImportError:
        raise InvalidRequestError("grammars and tool calls need the package llguidance: pip install 'sharpi[serve]'"
                                  ) from None
    return library


def parser_limits() -> object:
    """What one grammar may cost. The library's own limits allow 250 MB of lexer states and steps of 20 ms."""
    return llguidance().LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=100_000, step_max_items=50_000,
                                       max_items_in_row=2_000, max_lexer_states=50_000, max_grammar_size=100_000,
                                       precompute_large_lexemes=False, verbose_errors=False)
