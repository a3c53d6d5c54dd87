// See operands.h.
#include "ptx/operands.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "ptx/text.h"

namespace sharpi::emulator {

namespace {

size_t roundedUp(size_t value, size_t to) { return (value + to - 1) / to * to; }

const std::map<std::string_view, Special>& specials() {
    static const std::map<std::string_view, Special> names = {{"%tid.x", Special::TidX},
                                                              {"%tid.y", Special::TidY},
                                                              {"%tid.z", Special::TidZ},
                                                              {"%ntid.x", Special::NtidX},
                                                              {"%ntid.y", Special::NtidY},
                                                              {"%ntid.z", Special::NtidZ},
                                                              {"%ctaid.x", Special::CtaidX},
                                                              {"%ctaid.y", Special::CtaidY},
                                                              {"%ctaid.z", Special::CtaidZ},
                                                              {"%nctaid.x", Special::NctaidX},
                                                              {"%nctaid.y", Special::NctaidY},
                                                              {"%nctaid.z", Special::NctaidZ},
                                                              {"%laneid", Special::Lane},
                                                              {"%lanemask_le", Special::LanesBelowOrAt},
                                                              {"%lanemask_lt", Special::LanesBelow},
                                                              {"%lanemask_gt", Special::LanesAbove},
                                                              {"%lanemask_ge", Special::LanesAboveOrAt},
                                                              {"%lanemask_eq", Special::LaneBit},
                                                              {"%warpid", Special::WarpNumber}};
    return names;
}

// Where what a launch asks for in shared memory is until the sizes of all variables are known: it comes after them.
constexpr size_t kDynamic = 0x40000000;

}  // namespace

Operands::Operands(const Module& module, const std::string& name) : _module(module) {
    kernel().name = name;
    _draft.registers.resize(kSpecials);
    _scopes.emplace_back();
    constant(0, 4);  // at 0
}

void Operands::refuse(const std::string& what) {
    throw Fault(kernel().name + ": " + what + ": " + std::string(_statement));
}

void Operands::readHead(std::string_view head) {
    const size_t open = head.find('('), close = head.find(')');
    if (open == std::string_view::npos) return;
    size_t at = 0;
    for (std::string_view text : splitList(head.substr(open + 1, close - open - 1))) {
        const Declaration declared = readDeclaration(text);
        at = roundedUp(at, declared.alignment);
        _parameters[declared.name] = at;
        kernel().parameters.push_back({at, declared.bytes});
        at += declared.bytes;
    }
    kernel().parameterBytes = at;
    const size_t threads = head.find(".maxntid");
    if (threads == std::string_view::npos) return;
    int count = 1;
    const std::string text(head.substr(threads + 8, head.find('\n', threads) - threads - 8));
    for (std::string_view part : splitList(text)) count *= std::max(1, std::atoi(std::string(part).c_str()));
    kernel().maximumThreads = count;
}

void Operands::declare() {
    if (startsWith(_statement, ".pragma")) return;
    if (startsWith(_statement, ".reg")) {
        const size_t typeAt = _statement.find('.', 1);
        const size_t typeEnd = std::min(_statement.find_first_of(" \t", typeAt), _statement.size());
        const std::string_view type = _statement.substr(typeAt, typeEnd - typeAt);
        Register reg;
        reg.typeBytes = type == ".pred" ? 0 : bytesOfType(type);
        if (type != ".pred" && !reg.typeBytes) refuse("registers of a type that is not emulated");
        reg.bytes = reg.typeBytes == 8 ? 8 : 4;
        for (std::string_view name : splitList(_statement.substr(typeEnd))) {
            const size_t angle = name.find('<');
            if (angle == std::string_view::npos) {
                _scopes.back()[std::string(name)] = addRegister(reg);
                continue;
            }
            const int count = std::atoi(std::string(name.substr(angle + 1)).c_str());
            for (int i = 0; i < count; ++i)
                _scopes.back()[std::string(name.substr(0, angle)) + std::to_string(i)] = addRegister(reg);
        }
        return;
    }
    const Declaration declared = readDeclaration(_statement);
    if (startsWith(_statement, ".shared")) {
        _shared[declared.name] = {declared.bytes, declared.alignment, nullptr};
    } else if (startsWith(_statement, ".local")) {
        size_t& bytes = kernel().localBytes;
        bytes = roundedUp(bytes, declared.alignment);
        _local[declared.name] = bytes;
        bytes = roundedUp(bytes + declared.bytes, 16);
    } else {
        refuse("a declaration that is not emulated");
    }
}

int Operands::addRegister(Register reg) {
    _draft.registers.push_back(reg);
    return static_cast<int>(_draft.registers.size()) - 1;
}

Operand Operands::constant(uint64_t bits, int bytes) {
    if (bytes == 4) bits &= 0xffffffffu;
    const auto [found, isNew] = _constants.try_emplace({bits, bytes}, 0);
    if (isNew) found->second = addConstant(bits, bytes);
    return found->second;
}

Operand Operands::addConstant(uint64_t bits, int bytes) {
    std::vector<uint8_t>& all = kernel().constants;
    const auto operand = static_cast<Operand>(all.size()) | 1;
    const auto* first = reinterpret_cast<const uint8_t*>(&bits);
    for (int l = 0; l < kLanes; ++l) all.insert(all.end(), first, first + bytes);
    return operand;
}

int Operands::findRegister(std::string_view name) {
    const auto special = specials().find(name);
    if (special != specials().end()) {
        kernel().specials |= 1u << static_cast<int>(special->second);
        return static_cast<int>(special->second);
    }
    const std::string key(name);
    for (size_t s = _scopes.size(); s-- > 0;) {
        const auto found = _scopes[s].find(key);
        if (found != _scopes[s].end()) return found->second;
    }
    return -1;
}

Operand Operands::result(std::string_view name, int bytes) {
    if (name == "_") return kNone;
    const int reg = findRegister(name);
    if (reg < 0) refuse("a result that is no register");
    if (bytes && _draft.registers[reg].bytes != bytes) refuse("a register of another size than the instruction");
    _draft.uses.back().results.push_back(reg);
    return draftOperand(reg);
}

Operand Operands::source(std::string_view name, int bytes) {
    const int reg = findRegister(name);
    if (reg >= 0) {
        if (bytes && _draft.registers[reg].bytes != bytes) refuse("a register of another size than the instruction");
        _draft.uses.back().sources.push_back(reg);
        return draftOperand(reg);
    }
    uint64_t bits = 0;
    if (readNumber(name, bytes, bits)) return constant(bits, bytes);
    Space space;
    int64_t added = 0;
    size_t at = 0;
    std::string_view symbol = name;
    if (const size_t plus = name.find('+'); plus != std::string_view::npos) {
        symbol = trimmed(name.substr(0, plus));
        uint64_t number = 0;
        if (!readNumber(name.substr(plus + 1), 8, number)) refuse("an operand that is not understood");
        added = static_cast<int64_t>(number);
    }
    if (!findSymbol(std::string(symbol), space, at)) refuse("an operand that is not understood");
    return symbolAddress(space, at + added, bytes);
}

bool Operands::findSymbol(const std::string& name, Space& space, size_t& at) {
    if (const auto found = _parameters.find(name); found != _parameters.end()) {
        space = Space::Parameter;
        at = found->second;
        return true;
    }
    if (const auto found = _local.find(name); found != _local.end()) {
        space = Space::Local;
        at = found->second;
        return true;
    }
    const auto own = _shared.find(name);
    const Variable* variable = own != _shared.end() ? &own->second : _module.shared(name);
    if (variable) {
        space = Space::Shared;
        at = placeShared(name, *variable);
        return true;
    }
    if (const Variable* global = _module.global(name)) {
        space = Space::Global;
        at = reinterpret_cast<size_t>(global->data);
        return true;
    }
    return false;
}

// Variables are laid out in the order of their first use.
size_t Operands::placeShared(const std::string& name, const Variable& variable) {
    if (variable.bytes == 0) {
        _dynamicAlignment = std::max(_dynamicAlignment, variable.alignment);
        return kDynamic;
    }
    const auto [found, isNew] = _sharedAt.try_emplace(name, 0);
    if (isNew) {
        size_t& bytes = kernel().sharedBytes;
        bytes = roundedUp(bytes, variable.alignment);
        found->second = bytes;
        bytes += variable.bytes;
    }
    return found->second;
}

// Constants that are moved in the end are kept apart from others, which may happen to be the same numbers.
Operand Operands::symbolAddress(Space space, size_t at, int bytes) {
    if (space != Space::Shared || at < kDynamic) return constant(at, bytes);
    if (bytes != 4) refuse("an address of 64 bits in shared memory");
    const auto [found, isNew] = _dynamicConstants.try_emplace(at, 0);
    if (isNew) found->second = addConstant(at, 4);
    return found->second;
}

void Operands::layOutShared() {
    Kernel& made = kernel();
    if (!_dynamicConstants.empty()) made.sharedBytes = roundedUp(made.sharedBytes, _dynamicAlignment);
    for (const auto& [at, operand] : _dynamicConstants) {
        const auto moved = static_cast<uint32_t>(at - kDynamic + made.sharedBytes);
        for (int l = 0; l < kLanes; ++l) std::memcpy(made.constants.data() + (operand & ~1) + l * 4, &moved, 4);
    }
}

Operand Operands::address(std::string_view text, int64_t& added, bool& wide) {
    if (text.size() < 2 || text.front() != '[') refuse("an address that is not understood");
    text = trimmed(text.substr(1, text.size() - 2));
    std::string_view base = text;
    added = 0;
    const size_t plus = text.find('+');
    if (plus != std::string_view::npos) {
        base = trimmed(text.substr(0, plus));
        uint64_t bits = 0;
        if (!readNumber(text.substr(plus + 1), 8, bits)) refuse("an address that is not understood");
        added = static_cast<int64_t>(bits);
    }
    const int reg = findRegister(base);
    if (reg >= 0) {
        wide = _draft.registers[reg].bytes == 8;
        return source(base, 0);
    }
    size_t at = 0;
    uint64_t bits = 0;
    wide = true;
    if (readNumber(base, 8, bits)) return constant(bits, 8);
    Space found;
    if (!findSymbol(std::string(base), found, at)) refuse("an address that is not understood");
    wide = found != Space::Shared;
    return symbolAddress(found, at, wide ? 8 : 4);
}

}  // namespace sharpi::emulator
