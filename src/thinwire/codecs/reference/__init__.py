"""The codecs in plain torch. They define the wire format and serve as reference for the other backends."""
