//! Names the library as the driver is named, so that a program that has it open finds it by that name.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
}
