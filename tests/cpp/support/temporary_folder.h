// A folder that goes when the test ends.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

namespace sharpi {

class TemporaryFolder {
public:
    TemporaryFolder() {
        std::string path = (std::filesystem::temp_directory_path() / "sharpi-test-XXXXXX").string();
        if (!::mkdtemp(path.data())) throw std::runtime_error("no temporary folder");
        _path = path;
    }
    ~TemporaryFolder() {
        std::error_code failed;
        std::filesystem::remove_all(_path, failed);
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;

    const std::string& path() const { return _path; }
    // All files below it.
    std::vector<std::filesystem::path> files() const {
        std::vector<std::filesystem::path> found;
        for (const auto& entry : std::filesystem::recursive_directory_iterator(_path))
            if (entry.is_regular_file()) found.push_back(entry.path());
        return found;
    }

private:
    std::string _path;
};

}  // namespace sharpi
