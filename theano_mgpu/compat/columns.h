// The columns of a convolution: im2col and col2im of Theano 1.0.5's CorrMM, which decide for each element whether it
// lies within the image. These here give the same results, bit by bit.
#include <algorithm>
#include <vector>

namespace mgpu_columns {
// Rows are short: vectors, written as such, take less time than the loops that g++ vectorises.
template <class T, int n> struct Vector {
    typedef T Type __attribute__((vector_size(n * sizeof(T))));
    static Type at(const T* from) { Type x; __builtin_memcpy(&x, from, sizeof x); return x; }
    static void put(Type x, T* to) { __builtin_memcpy(to, &x, sizeof x); }
};
template <class T> struct Four : Vector<T, 4> {
    typedef decltype(Vector<T, 4>::at(nullptr) < Vector<T, 4>::at(nullptr)) Order;
};

// im2col copies an image into columns.
struct Copy {
    template <int n, class T> static void move(T* image, T* columns) {
        Vector<T, n>::put(Vector<T, n>::at(image), columns);
    }
    template <class T> static void move_pairs(T* image, T* even, T* odd) {
        const auto x = Four<T>::at(image), y = Four<T>::at(image + 4);
        Four<T>::put(__builtin_shuffle(x, y, typename Four<T>::Order{0, 2, 4, 6}), even);
        Four<T>::put(__builtin_shuffle(x, y, typename Four<T>::Order{1, 3, 5, 7}), odd);
    }
};
// col2im adds columns to an image.
struct Add {
    template <int n, class T> static void move(T* image, T* columns) {
        Vector<T, n>::put(Vector<T, n>::at(image) + Vector<T, n>::at(columns), image);
    }
    template <class T> static void move_pairs(T* image, T* even, T* odd) {
        const auto x = Four<T>::at(even), y = Four<T>::at(odd);
        Four<T>::put(Four<T>::at(image) + __builtin_shuffle(x, y, typename Four<T>::Order{0, 4, 1, 5}), image);
        Four<T>::put(Four<T>::at(image + 4) + __builtin_shuffle(x, y, typename Four<T>::Order{2, 6, 3, 7}), image + 4);
    }
};

template <class Way, class T> static inline void move_row(T* image, T* columns, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8)
        Way::template move<8>(image + i, columns + i);
    for (; i + 4 <= n; i += 4)
        Way::template move<4>(image + i, columns + i);
    for (; i < n; i++)
        Way::template move<1>(image + i, columns + i);
}
// Move every other element to or from a row of its own.
template <class Way, class T> static inline void move_pairs(T* image, T* even, T* odd, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8)
        Way::move_pairs(image + i, even + i / 2, odd + i / 2);
    for (; i < n; i++)
        Way::template move<1>(image + i, (i % 2 ? odd : even) + i / 2);
}
// Move rows of n elements that are `pitch` apart in the image. Rows of usual lengths have code of their own.
template <class Way, int known, class T> static void move_rows(T* image, int pitch, T* columns, int rows, int n) {
    n = known ? known : n;
    for (int row = 0; row < rows; row++, image += pitch, columns += n)
        move_row<Way>(image, columns, n);
}

// One channel of an image, with the zeros around it. In each row, columns 0, stride, 2 * stride ... lie side by side,
// then columns 1, stride + 1 ... So the pixels that one element of the filter meets in a row are contiguous.
template <class T> struct Channel {
    const int height, width, top, left, stride, part;  // part: pixels side by side
    std::vector<T> pixels;

    Channel(int height, int width, int top, int bottom, int left, int right, int stride)
        : height(height), width(width), top(top), left(left), stride(stride),
          part((left + width + right + stride - 1) / stride), pixels((size_t)(top + height + bottom) * part * stride) {}
    T* at(int y, int x) { return pixels.data() + ((size_t)y * stride + x % stride) * part + x / stride; }

    template <class Way> void move_image(T* image) {
        for (int y = top; y < top + height; y++, image += width)
            if (stride == 1)
                move_row<Way>(image, at(y, left), width);
            else if (stride == 2)
                move_pairs<Way>(image, at(y, left), at(y, left + 1), width);
            else
                for (int x = 0; x < width; x++)
                    Way::template move<1>(image + x, at(y, left + x));
    }
    template <class Way> void move_columns(T* columns, int kernel_h, int kernel_w, int dilation_h, int dilation_w,
                                           int stride_h, int rows, int n) {
        for (int i = 0; i < kernel_h * kernel_w; i++, columns += rows * n) {
            T* from = at(i / kernel_w * dilation_h, i % kernel_w * dilation_w);
            const int pitch = stride_h * stride * part;
            switch (n) {
                case 4: move_rows<Way, 4>(from, pitch, columns, rows, n); break;
                case 7: move_rows<Way, 7>(from, pitch, columns, rows, n); break;
                case 8: move_rows<Way, 8>(from, pitch, columns, rows, n); break;
                case 14: move_rows<Way, 14>(from, pitch, columns, rows, n); break;
                case 16: move_rows<Way, 16>(from, pitch, columns, rows, n); break;
                default: move_rows<Way, 0>(from, pitch, columns, rows, n);
            }
        }
    }
};
template <class Way, class T> static void move_channels(T* image, int channels, int height, int width, int kernel_h,
        int kernel_w, int dilation_h, int dilation_w, int top, int bottom, int left, int right, int stride_h,
        int stride_w, T* columns) {
    Channel<T> channel(height, width, top, bottom, left, right, stride_w);
    const int rows = (height + top + bottom - (kernel_h - 1) * dilation_h - 1) / stride_h + 1;
    const int n = (width + left + right - (kernel_w - 1) * dilation_w - 1) / stride_w + 1;
    for (int c = 0; c < channels; c++, image += height * width, columns += kernel_h * kernel_w * rows * n) {
        if (std::is_same<Way, Copy>::value)
            channel.template move_image<Way>(image);
        else
            std::fill(channel.pixels.begin(), channel.pixels.end(), T(0));
        channel.template move_columns<Way>(columns, kernel_h, kernel_w, dilation_h, dilation_w, stride_h, rows, n);
        if (std::is_same<Way, Add>::value)
            channel.template move_image<Way>(image);
    }
}
}

template <class T, class... Geometry> static void im2col(const T* image, Geometry... geometry_and_columns) {
    mgpu_columns::move_channels<mgpu_columns::Copy>(const_cast<T*>(image), geometry_and_columns...);
}
template <class T> static void col2im(const T* columns, int channels, int height, int width, int kernel_h,
        int kernel_w, int dilation_h, int dilation_w, int top, int bottom, int left, int right, int stride_h,
        int stride_w, T* image) {
    mgpu_columns::move_channels<mgpu_columns::Add>(image, channels, height, width, kernel_h, kernel_w, dilation_h,
        dilation_w, top, bottom, left, right, stride_h, stride_w, const_cast<T*>(columns));
}
