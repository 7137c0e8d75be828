"""Large updates between parameter servers: parallel TLS streams that resume at the byte."""
