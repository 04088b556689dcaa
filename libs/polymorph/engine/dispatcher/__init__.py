"""The C++ dispatcher: kernel slots behind torch operators."""
