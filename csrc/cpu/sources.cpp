// Which sources a library was made of: cpu_build.py says so on the command line, cpu_library.py asks before it calls.

extern "C" const char* bytesplat_sources() { return BYTESPLAT_SOURCES; }
