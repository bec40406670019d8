# Fails if an object of the kernels offers a symbol that the linker may merge with another object's (weak, or unique):
# it would be linked once, for whichever instruction set comes first. Run with -DNM=... -DOBJECTS=...
execute_process(COMMAND ${NM} -C --defined-only ${OBJECTS} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
if(shared)
  list(JOIN shared "\n  " shared)
  message(FATAL_ERROR "kernels share symbols across instruction sets:\n  ${shared}")
endif()
