"""Wire formats that agents speak, each parsed into the router's own model and written from it."""
