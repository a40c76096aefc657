//! Modules and kernels: PTX text gives the names, registered closures give the meaning.

use std::fmt;
use std::sync::{Arc, Mutex};

use cuda_sys::types::{CUfunction, CUmodule, CUresult, CUstream};
use rustc_hash::FxHashMap;

use crate::arguments::{In, Out, Text, Untyped};
use crate::call::Call;
use crate::context::ContextKey;
use crate::handles::Handles;
use crate::memory::DeviceMemory;
use crate::stream::{Kernel, Work};

type Body =
    dyn Fn(&KernelParams, &mut DeviceMemory<'_>) -> Result<(), CUresult> + Send + Sync + 'static;

/// A launch's arguments as a registered kernel sees them.
#[derive(Clone, Debug, Default)]
pub struct KernelParams {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    values: Vec<Vec<u8>>,
}

impl KernelParams {
    /// The bytes of parameter `index`, as copied at the launch.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if the kernel has no such parameter.
    pub fn bytes(&self, index: usize) -> Result<&[u8], CUresult> {
        self.values.get(index).map(Vec::as_slice).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Parameter `index` as a 32-bit word.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it does not have 4 bytes.
    pub fn u32(&self, index: usize) -> Result<u32, CUresult> {
        let bytes = self.bytes(index)?.try_into();
        bytes.map(u32::from_le_bytes).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)
    }

    /// Parameter `index` as a 64-bit word, such as a device address.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if it does not have 8 bytes.
    pub fn u64(&self, index: usize) -> Result<u64, CUresult> {
        let bytes = self.bytes(index)?.try_into();
        bytes.map(u64::from_le_bytes).map_err(|_| CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

/// A kernel that launches by this name run.
#[derive(Clone)]
struct Registered {
    parameter_bytes: Arc<[usize]>,
    body: Arc<Body>,
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered").field("parameter_bytes", &self.parameter_bytes).finish()
    }
}

#[derive(Debug)]
struct Module {
    context: ContextKey,
    entries: Vec<String>,
    /// Functions that were asked for, by name.
    functions: FxHashMap<String, usize>,
}

#[derive(Debug)]
struct Function {
    context: ContextKey,
    name: Arc<str>,
    kernel: Registered,
}

#[derive(Debug)]
pub(crate) struct Modules {
    registered: FxHashMap<String, Registered>,
    modules: Handles<Module>,
    functions: Handles<Function>,
}

impl Modules {
    pub(crate) fn new() -> Self {
        Self {
            registered: FxHashMap::default(),
            modules: Handles::new(7),
            functions: Handles::new(8),
        }
    }

    /// Modules that were not unloaded.
    pub(crate) fn loaded(&self) -> usize {
        self.modules.len()
    }

    pub(crate) fn register(&mut self, name: &str, parameter_bytes: &[usize], body: Arc<Body>) {
        let kernel = Registered { parameter_bytes: parameter_bytes.into(), body };
        self.registered.insert(name.to_owned(), kernel);
    }

    /// The modules of a context that ends go with it.
    pub(crate) fn end_context(&mut self, context: ContextKey) {
        let of_context = self.modules.iter().filter(|(_, module)| module.context == context);
        let gone: Vec<_> = of_context.map(|(value, _)| value).collect();
        for value in gone {
            self.unload(value);
        }
    }

    fn unload(&mut self, value: usize) -> bool {
        let Some(module) = self.modules.remove(value) else { return false };
        for function in module.functions.values() {
            self.functions.remove(*function);
        }
        true
    }
}

/// The names that PTX text declares with `.entry`; `None` if it is not PTX.
fn entries(ptx: &str) -> Option<Vec<String>> {
    let text: String = ptx
        .lines()
        .map(|line| line.split("//").next().unwrap_or(""))
        .collect::<Vec<_>>()
        .join("\n");
    if !text.contains(".version") || !text.contains(".target") {
        return None;
    }
    let names = text.split(".entry").skip(1).filter_map(|rest| {
        let rest = rest.trim_start();
        let end = rest.find(|c: char| c.is_whitespace() || c == '(' || c == '{')?;
        Some(rest[..end].to_owned())
    });
    Some(names.collect())
}

pub(crate) fn load(call: &mut Call<'_>, out: Out<CUmodule>, image: Text) -> Result<(), CUresult> {
    let context = call.current()?;
    call.forbid_in_capture()?;
    out.required()?;
    let text = image.get()?.to_str().map_err(|_| CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    let entries = entries(text).ok_or(CUresult::CUDA_ERROR_INVALID_IMAGE)?;
    let module = Module { context, entries, functions: FxHashMap::default() };
    let value = call.modules.modules.insert(module);
    out.set(value as CUmodule)
}

/// The options are for a compiler, which there is none of here.
pub(crate) fn load_with_options(
    call: &mut Call<'_>,
    out: Out<CUmodule>,
    image: Text,
    _count: u32,
    _options: Untyped,
    _values: Untyped,
) -> Result<(), CUresult> {
    load(call, out, image)
}

pub(crate) fn unload(call: &mut Call<'_>, module: CUmodule) -> Result<(), CUresult> {
    call.current()?;
    let gone = call.modules.unload(module as usize);
    if gone { Ok(()) } else { Err(CUresult::CUDA_ERROR_INVALID_HANDLE) }
}

pub(crate) fn function(
    call: &mut Call<'_>,
    out: Out<CUfunction>,
    module: CUmodule,
    name: Text,
) -> Result<(), CUresult> {
    call.current()?;
    out.required()?;
    let missing = CUresult::CUDA_ERROR_NOT_FOUND;
    let name = name.get()?.to_str().map_err(|_| missing)?;
    let modules = &mut call.state.modules;
    let module = modules.modules.get_mut(module as usize);
    let module = module.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    if let Some(&function) = module.functions.get(name) {
        return out.set(function as CUfunction);
    }
    if !module.entries.iter().any(|entry| entry == name) {
        return Err(missing);
    }
    let kernel = modules.registered.get(name).ok_or(missing)?.clone();
    let (context, name_of) = (module.context, name.into());
    let function = modules.functions.insert(Function { context, name: name_of, kernel });
    module.functions.insert(name.to_owned(), function);
    out.set(function as CUfunction)
}

/// The most threads of a block, and its most in z.
const MAX_BLOCK: (u64, u32) = (1024, 64);
/// The most blocks of a grid in x, y and z.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// The most shared memory that a block gets without having asked for more: an attribute of functions,
/// which is not modelled.
pub(crate) const MAX_SHARED_BYTES: u32 = 48 << 10;

#[expect(clippy::too_many_arguments, reason = "the driver's signature")]
pub(crate) fn launch(
    call: &mut Call<'_>,
    function: CUfunction,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    shared_bytes: u32,
    stream: CUstream,
    parameters: In<*mut std::ffi::c_void>,
    extra: Untyped,
) -> Result<(), CUresult> {
    let stream = call.stream(stream)?;
    let entry = call.modules.functions.get(function as usize);
    let entry = entry.ok_or(CUresult::CUDA_ERROR_INVALID_HANDLE)?;
    let (name, kernel) = (Arc::clone(&entry.name), entry.kernel.clone());
    if call.context_of(stream) != Some(entry.context) {
        return Err(CUresult::CUDA_ERROR_INVALID_HANDLE);
    }
    let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
    let threads: u64 = block.iter().map(|&n| u64::from(n)).product();
    let empty = grid.contains(&0) || threads == 0;
    let grid_fits = grid.iter().zip(MAX_GRID).all(|(&blocks, most)| blocks <= most);
    let block_fits = threads <= MAX_BLOCK.0 && block_z <= MAX_BLOCK.1;
    let fits = grid_fits && block_fits && shared_bytes <= MAX_SHARED_BYTES;
    if empty || !fits || extra.0 != 0 {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    let mut values = Vec::with_capacity(kernel.parameter_bytes.len());
    for (index, &bytes) in kernel.parameter_bytes.iter().enumerate() {
        values.push(Untyped(parameters.at(index)? as u64).bytes(bytes)?);
    }
    let arguments = KernelParams { grid, block, values };
    let body = kernel.body;
    let kernel: Kernel =
        Arc::new(Mutex::new(move |memory: &mut DeviceMemory<'_>| body(&arguments, memory)));
    call.submit(stream, Work::Kernel(kernel), &name).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::entries;

    #[test]
    fn names_of_entries() {
        let ptx = ".version 7.0\n.target sm_70\n// .entry no\n.visible .entry one(\n.param .u64 p)\n\
                   { ret; }\n.entry two ()\n{ ret; }\n";
        assert_eq!(entries(ptx), Some(vec!["one".to_owned(), "two".to_owned()]));
        assert_eq!(entries("not ptx"), None);
    }
}
