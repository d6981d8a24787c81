"""Bridges to other libraries, each imported only when its data turn up."""
