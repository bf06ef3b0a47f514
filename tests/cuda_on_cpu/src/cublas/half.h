// Half precision; the same code as in prelude/bits.h, which cannot include headers of the host.
#pragma once
#include <cstdint>
#include <cstring>

inline float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | fraction << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    float subnormal = (float)fraction * 5.9604644775390625e-8f;
    return sign ? -subnormal : subnormal;
  }
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

inline uint16_t float_to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7fff;
  if (magnitude >= 0x477ff000) return sign | 0x7c00;
  if (magnitude >= 0x38800000) {
    magnitude += 0xfff + (magnitude >> 13 & 1);  // to the nearest, ties to even
    return sign | (magnitude - 0x38000000) >> 13;
  }
  float small;
  memcpy(&small, &magnitude, sizeof small);
  return sign | (uint32_t)__builtin_rintf(small * 16777216.0f);
}
