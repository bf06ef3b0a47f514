// Turns CUDA C++ into C++ that g++ compiles, by searching for the few constructs that C++ lacks. There is no parser: it
// covers the kernels of libgpuarray and Theano, and what it does not cover fails to compile.
#include "rewrite.h"

#include <cctype>
#include <set>

using std::string;

namespace standin {

static const char *const BLANKS = " \t\n\r";

// The source with comments and the text of literals as spaces. Positions stay, so that a search finds code only and its
// result is valid in the source too.
static string code_only(const string &source) {
  string code = source;
  size_t i = 0, size = source.size();
  while (i < size) {
    if (source.compare(i, 2, "//") == 0) {
      while (i < size && source[i] != '\n') code[i++] = ' ';
    } else if (source.compare(i, 2, "/*") == 0) {
      size_t end = source.find("*/", i + 2);
      end = end == string::npos ? size : end + 2;
      for (; i < end; i++)
        if (source[i] != '\n') code[i] = ' ';
    } else if (source[i] == '"' || source[i] == '\'') {
      char quote = source[i++];
      while (i < size && source[i] != quote && source[i] != '\n') {
        if (source[i] == '\\' && i + 1 < size) code[i++] = ' ';
        code[i++] = ' ';
      }
      i++;
    } else {
      i++;
    }
  }
  return code;
}

static bool is_word(char c) { return isalnum((unsigned char)c) || c == '_'; }

static size_t find_word(const string &text, const string &word, size_t from) {
  for (size_t i = text.find(word, from); i != string::npos; i = text.find(word, i + 1)) {
    size_t end = i + word.size();
    if ((i == 0 || !is_word(text[i - 1])) && (end >= text.size() || !is_word(text[end]))) return i;
  }
  return string::npos;
}

// The position of the bracket that closes the one at `open`.
static size_t closing(const string &text, size_t open) {
  int depth = 0;
  for (size_t i = open; i < text.size(); i++) {
    if (text[i] == '(' || text[i] == '[') depth++;
    if ((text[i] == ')' || text[i] == ']') && --depth == 0) return i;
  }
  return string::npos;
}

static string strip(const string &text) {
  size_t begin = text.find_first_not_of(BLANKS), end = text.find_last_not_of(BLANKS);
  return begin == string::npos ? "" : text.substr(begin, end - begin + 1);
}

// `extern __shared__ T name[];` becomes a pointer to the dynamic shared memory of the launch.
static string replace_dynamic_shared(string source) {
  const size_t word = sizeof "__shared__" - 1;
  for (size_t at = 0;;) {
    string code = code_only(source);
    at = find_word(code, "__shared__", at);
    if (at == string::npos) return source;
    size_t before = at ? code.find_last_not_of(" \t\n\\", at - 1) : string::npos;  // the word before, in a macro too
    size_t semicolon = code.find(';', at), bracket = code.find('[', at);
    bool is_extern = before != string::npos && before >= 5 && code.compare(before - 5, 6, "extern") == 0;
    if (!is_extern || semicolon == string::npos || bracket == string::npos || bracket > semicolon) {
      at += word;
      continue;
    }
    size_t start = before - 5, name_end = code.find_last_not_of(BLANKS, bracket - 1) + 1, name_begin = name_end;
    while (name_begin > at && (is_word(code[name_begin - 1]) || code[name_begin - 1] == '#')) name_begin--;
    string type = strip(source.substr(at + word, name_begin - at - word));
    string name = source.substr(name_begin, name_end - name_begin);
    source.replace(start, semicolon - start + 1, type + " *" + name + " = (" + type + " *)__standin_dynamic;");
    at = start;
  }
}

// C++ for one instruction: `$0` and so on stand for the operands. The first entry whose name is in the text counts.
static const struct {
  const char *instruction, *replacement;
} INSTRUCTIONS[] = {
  {"cvt.f32.f16", "$0 = __standin_half_to_float$1"},
  {"cvt.rn.f16.f32", "$0 = __standin_float_to_half$1"},
  {"laneid", "$0 = __standin_lane()"},
  {"lanemask_lt", "$0 = (1u << __standin_lane()) - 1"},
  {"lanemask_le", "$0 = (2u << __standin_lane()) - 1"},
  {"lanemask_gt", "$0 = ~((2u << __standin_lane()) - 1)"},
  {"lanemask_ge", "$0 = ~((1u << __standin_lane()) - 1)"},
  {"bfe.u32", "$0 = __standin_bfe32($1, $2, $3)"},
  {"bfe.u64", "$0 = __standin_bfe64($1, $2, $3)"},
  {"bfi.b32", "$0 = __standin_bfi32($1, $2, $3, $4)"},
  {"bfi.b64", "$0 = __standin_bfi64($1, $2, $3, $4)"},
};

// C++ for the body of asm(...), or an empty text where the instruction is unknown.
static string translate(const string &body, const string &code) {
  // The strings before the first colon are the instruction; each (...) after it is an operand.
  size_t colon = code.find(':');
  string head = body.substr(0, colon), instruction;
  for (size_t i = 0; i < head.size(); i++)
    if (head[i] == '"')
      for (i++; i < head.size() && head[i] != '"'; i++) instruction += head[i];
  std::vector<string> operands;
  for (size_t i = colon; i < code.size(); i++) {
    if (code[i] != '(') continue;
    size_t end = closing(code, i);
    if (end == string::npos) break;
    operands.push_back(body.substr(i, end - i + 1));
    i = end;
  }
  for (auto &entry : INSTRUCTIONS) {
    if (instruction.find(entry.instruction) == string::npos) continue;
    string result;
    for (const char *c = entry.replacement; *c; c++) {
      if (*c != '$') {
        result += *c;
        continue;
      }
      size_t operand = *++c - '0';
      if (operand >= operands.size()) return "";
      result += operands[operand];
    }
    return result;
  }
  return "";
}

// `asm("ptx" : "=r"(out) : "r"(in), ...)` becomes C++; g++ complains about an instruction that is not in the table.
static string replace_assembler(string source) {
  for (size_t at = 0;;) {
    string code = code_only(source);
    size_t found = find_word(code, "asm", at);
    if (found == string::npos) return source;
    at = found + 3;
    size_t open = code.find_first_not_of(BLANKS, at);
    if (open != string::npos && code.compare(open, 8, "volatile") == 0) open = code.find_first_not_of(BLANKS, open + 8);
    if (open == string::npos || code[open] != '(') continue;
    size_t close = closing(code, open);
    if (close == string::npos) continue;
    size_t length = close - open - 1;
    string result = translate(source.substr(open + 1, length), code.substr(open + 1, length));
    if (result.empty()) continue;
    source.replace(found, close - found + 1, result);
    at = found + result.size();
  }
}

string rewrite(const string &source) { return replace_assembler(replace_dynamic_shared(source)); }

// The word before the parameters of the function whose declaration goes on at `from`.
static string function_name(const string &code, size_t from) {
  for (size_t open = code.find('(', from); open != string::npos;) {
    size_t end = code.find_last_not_of(BLANKS, open - 1) + 1, begin = end;
    while (begin > 0 && is_word(code[begin - 1])) begin--;
    string name = code.substr(begin, end - begin);
    if (name != "__launch_bounds__" && name != "__attribute__") return name;
    size_t close = closing(code, open);
    open = close == string::npos ? close : code.find('(', close + 1);
  }
  return "";
}

std::vector<string> kernel_names(const string &source) {
  string code = code_only(source);
  std::vector<string> names;
  std::set<string> seen;
  for (const char *mark : {"KERNEL", "__global__"}) {  // KERNEL is libgpuarray's macro for extern "C" __global__
    for (size_t at = find_word(code, mark, 0); at != string::npos; at = find_word(code, mark, at + 1)) {
      size_t line = code.rfind('\n', at);
      size_t first = code.find_first_not_of(" \t", line == string::npos ? 0 : line + 1);
      if (code[first] == '#') continue;  // the macro's own definition
      string name = function_name(code, at);
      if (!name.empty() && !isdigit((unsigned char)name[0]) && seen.insert(name).second) names.push_back(name);
    }
  }
  return names;
}

bool uses_barrier(const string &source) {
  string code = code_only(source);
  // Parts of names, to find __shfl_down_sync and the like too. local_barrier is libgpuarray's macro for __syncthreads.
  for (const char *part : {"__syncthreads", "local_barrier", "__syncwarp", "__shfl", "__ballot", "__any", "__all"})
    if (code.find(part) != string::npos) return true;
  return false;
}

}  // namespace standin
