// Pieces of PTX text.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace sharpi::emulator {

std::string_view trimmed(std::string_view text);
// At commas outside of brackets and braces.
std::vector<std::string_view> splitList(std::string_view text);
std::vector<std::string_view> words(std::string_view text);
bool startsWith(std::string_view text, std::string_view start);
// 0x10, -3, 0f3F800000 and 0d3FF0000000000000: the bits, in as many bytes as they are used as.
bool readNumber(std::string_view text, int bytes, uint64_t& bits);
// The bytes of .b8, .u32, .f64 and the like; 0 if it is no type.
int bytesOfType(std::string_view type);

// A declaration of a variable or a parameter: ".align 4 .b8 name[16] = {...}".
struct Declaration {
    std::string name;
    size_t bytes = 0, alignment = 1;
    int elementBytes = 1;
    bool isOpen = false;  // name[]
    std::string_view values;
};
Declaration readDeclaration(std::string_view text);

// Goes through text statement by statement.
class Statements {
public:
    enum class Kind { End, Open, Close, Label, Location, File, Statement };
    explicit Statements(std::string_view text) : _text(text) {}
    Kind next(std::string_view& out);

private:
    std::string_view _text;
    size_t _at = 0;
};

}  // namespace sharpi::emulator
