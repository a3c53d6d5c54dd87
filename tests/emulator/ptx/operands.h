// What a kernel's instructions name: registers, constants and variables. See translator.h.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "execution/operations.h"
#include "ptx/draft.h"
#include "ptx/module.h"

namespace sharpi::emulator {

class Operands {
protected:
    Operands(const Module& module, const std::string& name);

    Kernel& kernel() { return *_draft.kernel; }
    Instruction& current() { return kernel().code.back(); }
    [[noreturn]] void refuse(const std::string& what);

    void readHead(std::string_view head);
    void declare();  // the statement
    int addRegister(Register reg);

    Operand constant(uint64_t bits, int bytes);
    // -1 if it is no register.
    int findRegister(std::string_view name);
    // Operands of the current instruction. bytes: the register's; 0: any.
    Operand result(std::string_view name, int bytes);
    Operand source(std::string_view name, int bytes);
    // "[%rd1+8]": the base becomes an operand.
    Operand address(std::string_view text, int64_t& added, bool& wide);
    // When all is translated: what a launch asks for comes after the variables.
    void layOutShared();

    Draft _draft;
    std::string_view _statement;
    std::vector<std::map<std::string, int>> _scopes;  // registers

private:
    Operand addConstant(uint64_t bits, int bytes);
    // The address of a variable in its space.
    bool findSymbol(const std::string& name, Space& space, size_t& at);
    size_t placeShared(const std::string& name, const Variable& variable);
    Operand symbolAddress(Space space, size_t at, int bytes);

    const Module& _module;
    std::map<std::pair<uint64_t, int>, Operand> _constants;
    std::map<std::string, size_t> _parameters, _local, _sharedAt;
    std::map<std::string, Variable> _shared;
    std::map<size_t, Operand> _dynamicConstants;
    size_t _dynamicAlignment = 1;
};

}  // namespace sharpi::emulator
