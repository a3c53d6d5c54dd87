// See module.h.
#include "ptx/module.h"

#include <cstdlib>
#include <cstring>

#include "execution/device_memory.h"
#include "ptx/text.h"
#include "ptx/translator.h"

namespace sharpi::emulator {

namespace {

// Where a block that opens at `at` closes.
size_t closing(std::string_view text, size_t at) {
    int depth = 0;
    for (; at < text.size(); ++at) {
        if (text[at] == '{') ++depth;
        if (text[at] == '}' && --depth == 0) return at;
    }
    throw Fault("PTX: a brace that does not close");
}

std::string nameBefore(std::string_view head, size_t end) {
    size_t begin = end;
    while (begin > 0 && !std::strchr(" \t\n", head[begin - 1])) --begin;
    return std::string(head.substr(begin, end - begin));
}

}  // namespace

Module::Module(std::string text) : _text(std::move(text)) {
    const std::string_view all = _text;
    for (size_t at = 0; at < all.size();) {
        const size_t lineEnd = std::min(all.find('\n', at), all.size());
        const std::string_view line = trimmed(all.substr(at, lineEnd - at));
        if (line.empty() || line[0] != '.' || startsWith(line, ".version") || startsWith(line, ".target") ||
            startsWith(line, ".address_size") || startsWith(line, ".loc")) {
            at = lineEnd + 1;
        } else if (startsWith(line, ".file")) {
            const std::vector<std::string_view> parts = words(line);
            const size_t number = parts.size() > 2 ? std::strtoul(std::string(parts[1]).c_str(), nullptr, 10) : 0;
            if (_files.size() <= number) _files.resize(number + 1);
            if (parts.size() > 2) _files[number] = std::string(parts[2].substr(1, parts[2].size() - 2));
            at = lineEnd + 1;
        } else {
            const size_t semicolon = std::min(all.find(';', at), all.size());
            const size_t brace = all.find('{', at);
            const bool isSection = startsWith(line, ".section");
            const std::string_view before = all.substr(at, std::min(brace, semicolon) - at);
            const bool isEntry = before.find(".entry") != std::string_view::npos;
            if (isSection || isEntry || before.find(".func") != std::string_view::npos) {
                const size_t end = closing(all, brace);
                if (isEntry) {
                    Entry entry;
                    entry.head = all.substr(at, brace - at);
                    entry.body = all.substr(brace + 1, end - brace - 1);
                    _entries[nameBefore(entry.head, entry.head.find('('))] = std::move(entry);
                }
                at = end + 1;
            } else {
                readVariable(all.substr(at, semicolon - at));
                at = semicolon + 1;
            }
        }
    }
}

Module::~Module() {
    for (auto& [name, variable] : _globals) DeviceMemory::instance().release(variable.data);
}

void Module::readVariable(std::string_view text) {
    const Declaration declared = readDeclaration(text);
    Variable variable;
    variable.bytes = declared.bytes;
    variable.alignment = declared.alignment;
    if (text.find(".shared") != std::string_view::npos) {
        _shared[declared.name] = variable;
        return;
    }
    if (declared.name.empty()) return;
    variable.data = static_cast<uint8_t*>(DeviceMemory::instance().take(std::max<size_t>(declared.bytes, 1)));
    std::memset(variable.data, 0, std::max<size_t>(declared.bytes, 1));
    if (!declared.values.empty()) {
        std::string_view values = declared.values;
        if (values.front() == '{') values = values.substr(1, values.find('}') - 1);
        size_t offset = 0;
        for (std::string_view value : splitList(values)) {
            uint64_t bits = 0;
            if (!readNumber(value, declared.elementBytes, bits))
                throw Fault("PTX: the value '" + std::string(value) + "' of " + declared.name + " is not understood");
            std::memcpy(variable.data + offset, &bits, declared.elementBytes);
            offset += declared.elementBytes;
        }
    }
    _globals[declared.name] = variable;
}

std::vector<std::string> Module::kernels() const {
    std::vector<std::string> names;
    for (const auto& [name, entry] : _entries) names.push_back(name);
    return names;
}

const Kernel& Module::kernel(const std::string& name) {
    const std::lock_guard<std::mutex> lock(_mutex);
    const auto found = _entries.find(name);
    if (found == _entries.end()) throw Fault("there is no kernel " + name);
    Entry& entry = found->second;
    if (!entry.kernel) {
        entry.kernel = translate(*this, name, entry.head, entry.body);
        entry.kernel->files = &_files;
    }
    return *entry.kernel;
}

const Variable* Module::global(const std::string& name) const {
    const auto found = _globals.find(name);
    return found == _globals.end() ? nullptr : &found->second;
}

const Variable* Module::shared(const std::string& name) const {
    const auto found = _shared.find(name);
    return found == _shared.end() ? nullptr : &found->second;
}

std::string Kernel::placeOf(const Instruction& instruction) const {
    std::string file = "?";
    if (files && instruction.file < static_cast<int>(files->size())) file = (*files)[instruction.file];
    const size_t slash = file.rfind('/');
    if (slash != std::string::npos) file = file.substr(slash + 1);
    return file + ":" + std::to_string(instruction.line);
}

}  // namespace sharpi::emulator
