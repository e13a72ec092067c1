from tests.cli.run import sottovoce

__all__ = ["sottovoce"]
