// A module of PTX: its variables, and its kernels, each of which is translated when it is first wanted.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "ptx/program.h"

namespace sharpi::emulator {

// A variable in one of the state spaces.
struct Variable {
    size_t bytes = 0;  // 0: as much as a launch asks for
    size_t alignment = 1;
    uint8_t* data = nullptr;  // of a global one
};

class Module {
public:
    explicit Module(std::string text);
    ~Module();
    Module(const Module&) = delete;
    Module& operator=(const Module&) = delete;

    bool has(const std::string& kernel) const { return _entries.count(kernel) != 0; }
    std::vector<std::string> kernels() const;
    // Throws Fault if there is no such kernel, or if it has an instruction that is not emulated.
    const Kernel& kernel(const std::string& name);
    const Variable* global(const std::string& name) const;
    const Variable* shared(const std::string& name) const;

private:
    struct Entry {
        std::string_view head, body;
        std::unique_ptr<Kernel> kernel;
    };
    void readVariable(std::string_view text);

    std::string _text;
    std::mutex _mutex;
    std::map<std::string, Entry> _entries;
    std::map<std::string, Variable> _globals, _shared;
    std::vector<std::string> _files;
};

}  // namespace sharpi::emulator
