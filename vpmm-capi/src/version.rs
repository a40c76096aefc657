//! The library's version.

/// The version: a million times the major, a thousand times the minor, and the patch number.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_version() -> u32 {
    const fn number(text: &str) -> u32 {
        let (bytes, mut at, mut value) = (text.as_bytes(), 0, 0);
        while at < bytes.len() {
            value = value * 10 + (bytes[at] - b'0') as u32;
            at += 1;
        }
        value
    }
    const VERSION: u32 = number(env!("CARGO_PKG_VERSION_MAJOR")) * 1_000_000
        + number(env!("CARGO_PKG_VERSION_MINOR")) * 1_000
        + number(env!("CARGO_PKG_VERSION_PATCH"));
    VERSION
}
