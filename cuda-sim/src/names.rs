//! C strings for result codes.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

use cuda_sys::types::CUresult;

/// By code: the constant's name, and the same in words.
static TEXTS: OnceLock<HashMap<u32, (CString, CString)>> = OnceLock::new();

fn texts(code: CUresult) -> Option<&'static (CString, CString)> {
    let table = TEXTS.get_or_init(|| {
        let text = |code: CUresult| {
            let name = code.name()?;
            let words = name.strip_prefix("CUDA_").unwrap_or(name);
            let words = words.strip_prefix("ERROR_").unwrap_or(words);
            let words = words.to_lowercase().replace('_', " ");
            Some((code.0, (CString::new(name).ok()?, CString::new(words).ok()?)))
        };
        CUresult::all().filter_map(text).collect()
    });
    table.get(&code.0)
}

/// The name of a code, `None` for one that the bindings do not know.
pub(crate) fn name(code: CUresult) -> Option<&'static CStr> {
    texts(code).map(|texts| texts.0.as_c_str())
}

/// The code in words.
pub(crate) fn words(code: CUresult) -> Option<&'static CStr> {
    texts(code).map(|texts| texts.1.as_c_str())
}
