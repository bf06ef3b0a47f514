// Compiles a kernel's source with g++, or takes the result from the cache on disk. An entry of the cache is named by a
// hash of everything that the compiler reads, so that it is never stale, and is renamed into place, so that processes
// may compile the same kernel at once.
#include "compile.h"

#include "common.h"
#include "rewrite.h"

#include <cerrno>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <pwd.h>
#include <spawn.h>
#include <sstream>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
using std::string;

namespace standin {

// Included before every kernel, in this order.
static const char *const PRELUDE[] = {
  "types.h", "threads.h", "atomics.h", "bits.h", "mathematics.h", "special.h", "intrinsics.h", "kernels.h"
};

static const char *const FLAGS[] = {
  "-x", "c++", "-std=gnu++17", "-w", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti",
  "-fno-strict-aliasing", "-fwrapv", "-fno-math-errno", "-fno-asynchronous-unwind-tables", "-pipe",
  "-nostdinc", "-nostdlib",  // nvrtc has no headers of the host either
};

// The setting CUDA_ON_CPU_<name>.
static string setting(const char *name, const string &otherwise = "") {
  const char *value = getenv((string("CUDA_ON_CPU_") + name).c_str());
  return value && *value ? value : otherwise;
}

static string read_file(const string &path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

static bool write_file(const string &path, const string &text) {
  FILE *file = fopen(path.c_str(), "wb");
  if (!file) return false;
  bool complete = fwrite(text.data(), 1, text.size(), file) == text.size();
  return fclose(file) == 0 && complete;
}

// Creates a folder and its parents; another process may create them at the same time.
static bool make_folders(const string &path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    if (mkdir(path.substr(0, slash).c_str(), 0700) != 0 && errno != EEXIST && slash == string::npos) return false;
    if (slash == string::npos) return true;
  }
}

// The folder of this library. Symbolic links are followed: prelude/ is beside the library, not beside a link to it.
static string library_folder() {
  Dl_info info;
  if (!dladdr((void *)&library_folder, &info)) return ".";
  char real[4096];
  string path = realpath(info.dli_fname, real) ? real : info.dli_fname;
  size_t slash = path.rfind('/');
  return slash == string::npos ? "." : path.substr(0, slash);
}

static string cache_folder() {
  string folder = setting("CACHE");
  if (!folder.empty()) return folder;
  const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
  if (cache && *cache) return string(cache) + "/theano_mgpu/cuda_on_cpu";
  const passwd *user = home && *home ? nullptr : getpwuid(getuid());
  return string(user ? user->pw_dir : home ? home : "/tmp") + "/.cache/theano_mgpu/cuda_on_cpu";
}

// A hash of 128 bits over texts: two FNV-1a hashes with different starts.
class Hash {
 public:
  void add(const string &text) {
    for (unsigned char c : text) mix(c);
    mix(text.size());
  }
  string hex() const {
    char digits[40];
    snprintf(digits, sizeof digits, "%016llx%016llx", a, b);
    return digits;
  }

 private:
  void mix(unsigned long long value) {
    a = (a ^ value) * 0x100000001b3ull;
    b = (b ^ value) * 0x100000001b3ull + 0x9e3779b97f4a7c15ull;
  }
  unsigned long long a = 0xcbf29ce484222325ull, b = 0x84222325cbf29ce4ull;
};

// Runs a program and returns its wait status, or -1 where it cannot be run. Its output goes to a file.
static int run(const std::vector<string> &arguments, const string &output) {
  std::vector<char *> argv;
  for (auto &argument : arguments) argv.push_back((char *)argument.c_str());
  argv.push_back(nullptr);
  // LD_LIBRARY_PATH and LD_PRELOAD are not for the compiler, and its messages are wanted in English.
  static char language[] = "LC_ALL=C";
  std::vector<char *> environment;
  for (char **entry = environ; *entry; entry++)
    if (strncmp(*entry, "LD_LIBRARY_PATH=", 16) && strncmp(*entry, "LD_PRELOAD=", 11) && strncmp(*entry, "LC_ALL=", 7))
      environment.push_back(*entry);
  environment.push_back(language);
  environment.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t pid;
  int failed = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environment.data());
  posix_spawn_file_actions_destroy(&actions);
  if (failed) {
    write_file(output, "cannot run " + arguments[0] + ": " + strerror(failed));
    return -1;
  }
  int status = 0;
  while (waitpid(pid, &status, 0) < 0)
    if (errno != EINTR) return -1;
  return status;
}

static void remove_folder(const string &folder, const Source &source) {
  for (const char *file : {"default_program.cpp", "kernel.so", "log"}) unlink((folder + "/" + file).c_str());
  for (auto &header : source.headers) unlink((folder + "/" + header.first).c_str());
  rmdir(folder.c_str());
}

// Writes a kernel's source and headers as they were given, as input for NVIDIA's own nvrtc.
static void keep_sources(const string &folder, const string &key, const Source &source) {
  bool complete = make_folders(folder) && write_file(folder + "/" + key + ".cu", source.text);
  for (auto &header : source.headers) complete = write_file(folder + "/" + header.first, header.second) && complete;
  if (!complete) say("cannot write a kernel's source to CUDA_ON_CPU_SOURCES=%s: %s", folder.c_str(), strerror(errno));
}

Outcome compile(const Source &source, int architecture, string *object, string *log) {
  static const string library = library_folder();
  Source rewritten{"#define __CUDA_ARCH__ " + std::to_string(architecture) + "\n", {}};
  for (const char *header : PRELUDE) rewritten.text += string("#include \"prelude/") + header + "\"\n";
  rewritten.text += "#line 1 \"default_program\"\n" + rewrite(source.text) + "\n#line 1 \"cuda-on-cpu\"\n";
  for (const string &name : kernel_names(source.text)) rewritten.text += "__standin_register(" + name + ")\n";
  rewritten.text += string("__standin_module(") + (uses_barrier(source.text) ? "1" : "0") + ")\n";
  for (auto &header : source.headers) rewritten.headers.emplace_back(header.first, rewrite(header.second));

  std::vector<string> command = {setting("CXX", "g++")};
  command.insert(command.end(), std::begin(FLAGS), std::end(FLAGS));
  std::istringstream levels(setting("OPT", "-O1"));
  for (string level; levels >> level;) command.push_back(level);

  Hash hash;
  for (const char *header : PRELUDE) hash.add(read_file(library + "/prelude/" + header));
  for (const string &argument : command) hash.add(argument);
  hash.add(rewritten.text);
  for (auto &header : rewritten.headers) {
    hash.add(header.first);
    hash.add(header.second);
  }
  const string key = hash.hex(), sources = setting("SOURCES");
  if (!sources.empty()) keep_sources(sources, key, source);

  const string cache = cache_folder(), cached = cache + "/" + key + ".so";
  *object = read_file(cached);
  if (!object->empty()) return Outcome::compiled;

  string folder = cache + "/tmp.XXXXXX";
  if (!make_folders(cache) || !mkdtemp(&folder[0])) {
    *log = "cuda-on-cpu: cannot write to the cache " + cache + ": " + strerror(errno);
    return Outcome::internal_error;
  }
  bool written = write_file(folder + "/default_program.cpp", rewritten.text);
  for (auto &header : rewritten.headers) written = write_file(folder + "/" + header.first, header.second) && written;
  Outcome outcome = Outcome::internal_error;
  if (!written) {
    *log = "cuda-on-cpu: cannot write a kernel's source to " + folder + ": " + strerror(errno);
  } else {
    for (const string &argument : {"-I" + folder, "-I" + library, string("-o"), folder + "/kernel.so",
                                   folder + "/default_program.cpp", string("-lgcc")})
      command.push_back(argument);
    int status = run(command, folder + "/log");
    *log = read_file(folder + "/log");
    if (status == 0) *object = read_file(folder + "/kernel.so");
    if (status != -1) outcome = object->empty() ? Outcome::source_error : Outcome::compiled;
    // A kernel that cannot be kept still runs; it is compiled again next time.
    if (outcome == Outcome::compiled && rename((folder + "/kernel.so").c_str(), cached.c_str()) != 0)
      say("cannot keep a compiled kernel as %s: %s", cached.c_str(), strerror(errno));
  }
  if (setting("KEEP").empty()) remove_folder(folder, rewritten);
  return outcome;
}

}  // namespace standin
