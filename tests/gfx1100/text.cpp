#include "memory.h"
namespace gfx { std::string text_of(const Instruction &i) { return i.name; } }
