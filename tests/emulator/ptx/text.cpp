// See text.h.
#include "ptx/text.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "ptx/program.h"

namespace sharpi::emulator {

namespace {

bool isSpace(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

bool isNamePart(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
           c == '%';
}

}  // namespace

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && isSpace(text.front())) text.remove_prefix(1);
    while (!text.empty() && isSpace(text.back())) text.remove_suffix(1);
    return text;
}

bool startsWith(std::string_view text, std::string_view start) { return text.substr(0, start.size()) == start; }

std::vector<std::string_view> splitList(std::string_view text) {
    std::vector<std::string_view> parts;
    int depth = 0;
    size_t begin = 0;
    for (size_t i = 0; i <= text.size(); ++i) {
        const char c = i < text.size() ? text[i] : ',';
        if (c == '{' || c == '[' || c == '(') ++depth;
        if (c == '}' || c == ']' || c == ')') --depth;
        if (c != ',' || depth != 0) continue;
        const std::string_view part = trimmed(text.substr(begin, i - begin));
        if (!part.empty()) parts.push_back(part);
        begin = i + 1;
    }
    return parts;
}

std::vector<std::string_view> words(std::string_view text) {
    std::vector<std::string_view> found;
    for (size_t i = 0; i < text.size();) {
        while (i < text.size() && isSpace(text[i])) ++i;
        const size_t begin = i;
        while (i < text.size() && !isSpace(text[i])) ++i;
        if (i > begin) found.push_back(text.substr(begin, i - begin));
    }
    return found;
}

bool readNumber(std::string_view text, int bytes, uint64_t& bits) {
    std::string digits(trimmed(text));
    if (digits.empty()) return false;
    if (startsWith(digits, "0f") || startsWith(digits, "0F")) {
        bits = std::strtoul(digits.c_str() + 2, nullptr, 16);
        if (bytes == 8) {
            const auto word = static_cast<uint32_t>(bits);
            float value;
            std::memcpy(&value, &word, sizeof(value));
            const double wide = value;
            std::memcpy(&bits, &wide, sizeof(bits));
        }
        return true;
    }
    if (startsWith(digits, "0d") || startsWith(digits, "0D")) {
        bits = std::strtoull(digits.c_str() + 2, nullptr, 16);
        return true;
    }
    const bool negative = digits[0] == '-';
    if (negative || digits[0] == '+') digits.erase(0, 1);
    if (digits.empty() || digits[0] < '0' || digits[0] > '9') return false;
    if (digits.back() == 'U') digits.pop_back();
    char* end = nullptr;
    bits = std::strtoull(digits.c_str(), &end, 0);
    if (*end) return false;
    if (negative) bits = 0 - bits;
    return true;
}

int bytesOfType(std::string_view type) {
    if (!type.empty() && type[0] == '.') type.remove_prefix(1);
    if (type.size() < 2 || !std::strchr("busf", type[0])) return 0;
    const std::string_view number = type.substr(1);
    return number == "8" ? 1 : number == "16" ? 2 : number == "32" ? 4 : number == "64" ? 8 : 0;
}

Declaration readDeclaration(std::string_view text) {
    Declaration found;
    const size_t equals = text.find('=');
    if (equals != std::string_view::npos) {
        found.values = trimmed(text.substr(equals + 1));
        text = text.substr(0, equals);
    }
    const std::vector<std::string_view> parts = words(text);
    std::string_view name;
    for (size_t i = 0; i < parts.size(); ++i) {
        if (parts[i] == ".align" && i + 1 < parts.size()) {
            found.alignment = std::strtoul(std::string(parts[++i]).c_str(), nullptr, 10);
        } else if (const int bytes = bytesOfType(parts[i])) {
            found.elementBytes = bytes;
        } else if (parts[i][0] != '.') {
            name = parts[i];
        }
    }
    if (found.alignment < static_cast<size_t>(found.elementBytes)) found.alignment = found.elementBytes;
    size_t count = 1;
    const size_t bracket = name.find('[');
    if (bracket != std::string_view::npos) {
        const std::string number(name.substr(bracket + 1));
        found.isOpen = number[0] == ']';
        count = found.isOpen ? 0 : std::strtoul(number.c_str(), nullptr, 10);
        name = name.substr(0, bracket);
    }
    found.name = std::string(name);
    found.bytes = count * found.elementBytes;
    return found;
}

Statements::Kind Statements::next(std::string_view& out) {
    for (;;) {
        while (_at < _text.size() && isSpace(_text[_at])) ++_at;
        if (_text.substr(_at, 2) != "//") break;
        _at = std::min(_text.find('\n', _at), _text.size());
    }
    if (_at >= _text.size()) return Kind::End;
    const char c = _text[_at];
    if (c == '{' || c == '}') {
        out = _text.substr(_at++, 1);
        return c == '{' ? Kind::Open : Kind::Close;
    }
    const size_t begin = _at;
    if (c == '.') {
        size_t end = begin + 1;
        while (end < _text.size() && isNamePart(_text[end])) ++end;
        const std::string_view name = _text.substr(begin, end - begin);
        if (name == ".loc" || name == ".file" || name == ".version" || name == ".target" || name == ".address_size") {
            _at = std::min(_text.find('\n', begin), _text.size());
            out = trimmed(_text.substr(begin, _at - begin));
            return name == ".loc" ? Kind::Location : Kind::File;
        }
    } else {
        size_t end = begin;
        while (end < _text.size() && isNamePart(_text[end])) ++end;
        if (end < _text.size() && _text[end] == ':' && _text.substr(end, 2) != "::") {
            out = _text.substr(begin, end - begin);
            _at = end + 1;
            return Kind::Label;
        }
    }
    const size_t end = std::min(_text.find(';', begin), _text.size());
    out = trimmed(_text.substr(begin, end - begin));
    _at = std::min(end + 1, _text.size());
    return Kind::Statement;
}

}  // namespace sharpi::emulator
