//! Snapshots as JSON, in the structure that PyTorch's have: its tools read them once they are pickled,
//! which the Python package does.

use std::ffi::{c_char, c_void};
use std::fmt::{self, Write};

use vpmm_core::Pool;
use vpmm_core::snapshot::{BlockState, HeapName, Segment};

use crate::guard::{Failure, given, guard};
use crate::pool::vpmm_pool;
use crate::status::vpmm_status;

/// Takes the next bytes of a text. It lets no exception out.
pub type vpmm_write =
    Option<unsafe extern "C" fn(context: *mut c_void, bytes: *const c_char, length: usize)>;

/// Bytes that are written at a time.
const CHUNK: usize = 64 << 10;

/// Collects text, and hands it on in chunks.
pub(crate) struct Out {
    write: unsafe extern "C" fn(*mut c_void, *const c_char, usize),
    context: *mut c_void,
    text: String,
}

impl Out {
    /// # Safety
    /// `write` can be called with `context`, and lets no exception out.
    pub(crate) unsafe fn new(write: vpmm_write, context: *mut c_void) -> Result<Self, Failure> {
        let write = write.ok_or_else(|| Failure::null("write"))?;
        Ok(Self { write, context, text: String::with_capacity(CHUNK + 4096) })
    }

    fn flush(&mut self) {
        if !self.text.is_empty() {
            // SAFETY: whoever made this vouches for the function; the bytes are there during it.
            unsafe { (self.write)(self.context, self.text.as_ptr().cast(), self.text.len()) };
            self.text.clear();
        }
    }
}

impl Write for Out {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.text.push_str(text);
        if self.text.len() >= CHUNK {
            self.flush();
        }
        Ok(())
    }
}

impl Drop for Out {
    fn drop(&mut self) {
        self.flush();
    }
}

/// A text as JSON has it.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for letter in self.0.chars() {
            match letter {
                '"' | '\\' => write!(f, "\\{letter}")?,
                letter if (letter as u32) < 0x20 => write!(f, "\\u{:04x}", letter as u32)?,
                letter => f.write_char(letter)?,
            }
        }
        f.write_char('"')
    }
}

/// PyTorch's names for what a block is, and ours.
fn names(state: BlockState) -> (&'static str, &'static str) {
    match state {
        BlockState::Live => ("active_allocated", "live"),
        BlockState::Deferred => ("active_pending_free", "deferred"),
        BlockState::Cached => ("inactive", "cached"),
        BlockState::Pending => ("inactive", "pending"),
        _ => ("inactive", "idle"),
    }
}

fn write_segment(out: &mut impl Write, device: u32, segment: &Segment) -> fmt::Result {
    let live = segment.bytes_in(BlockState::Live);
    let active = live + segment.bytes_in(BlockState::Deferred);
    let (heap, number) = match &segment.heap {
        HeapName::Graph(number) => (format!("graph {number}"), *number + 1),
        HeapName::Tagged(tag) => (format!("tag {tag}"), 0),
        _ => ("main".to_owned(), 0),
    };
    write!(
        out,
        "{{\"device\":{device},\"address\":{},\"total_size\":{},\"allocated_size\":{live},\
         \"active_size\":{active},\"requested_size\":{active},\"stream\":0,\"segment_type\":\"{}\",\
         \"segment_pool_id\":[0,{number}],\"is_expandable\":true,\"heap\":{},\"is_asleep\":{},\
         \"frames\":[],\"blocks\":[",
        segment.address,
        segment.bytes,
        if segment.is_small { "small" } else { "large" },
        Quoted(&heap),
        segment.is_asleep,
    )?;
    for (at, block) in segment.blocks.iter().enumerate() {
        let (state, own) = names(block.state);
        let comma = if at == 0 { "" } else { "," };
        let is_active = matches!(block.state, BlockState::Live | BlockState::Deferred);
        let requested = if is_active { block.bytes } else { 0 };
        write!(
            out,
            "{comma}{{\"address\":{},\"size\":{},\"requested_size\":{requested},\
             \"state\":\"{state}\",\"vpmm_state\":\"{own}\",\"frames\":[]",
            block.address, block.bytes
        )?;
        if let Some(stream) = block.stream {
            write!(out, ",\"stream_number\":{stream}")?;
        }
        out.write_str("}")?;
    }
    out.write_str("]}")
}

/// The segments of some pools.
pub(crate) fn write_segments(out: &mut impl Write, pools: &[&Pool]) -> fmt::Result {
    out.write_str("\"segments\":[")?;
    let mut comma = "";
    for pool in pools {
        for segment in pool.snapshot() {
            out.write_str(comma)?;
            write_segment(out, pool.device().ordinal(), &segment)?;
            comma = ",";
        }
    }
    out.write_str("]")
}

/// Writes what the pool holds as JSON, piece by piece: a list of segments, each with its blocks, under
/// the names of `torch.cuda.memory._snapshot()`. Beyond those, a segment has its `heap`, a block its
/// `vpmm_state` (`live`, `deferred`, `cached`, `pending`, `idle`).
///
/// # Safety
/// `pool` is null or a handle; `write` is null or can be called with `context`, and lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_snapshot(
    pool: *const vpmm_pool,
    write: vpmm_write,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let pool = unsafe { given(pool, "pool") }?.pool();
        // SAFETY: the caller vouches for it.
        let mut out = unsafe { Out::new(write, context) }?;
        // It collects text: nothing in it fails.
        let _ = out.write_str("{").and_then(|()| write_segments(&mut out, &[pool]));
        let _ =
            out.write_str(",\"device_traces\":[],\"allocator_settings\":{\"backend\":\"vpmm\"},");
        let _ = out.write_str("\"external_annotations\":[]}");
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_quoted() {
        assert_eq!(Quoted("a \"b\" \\ \n é").to_string(), r#""a \"b\" \\ \u000a é""#);
    }

    #[test]
    fn what_waits_for_further_streams_is_active_and_pending_free() {
        let sim =
            cuda_sim::Simulator::builder().schedule(cuda_sim::Schedule::Manual).build().unwrap();
        let device = vpmm_core::Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let pool = Pool::new(&device, &vpmm_core::PoolConfig::default()).unwrap();
        let (own, side) = (device.stream().unwrap(), device.stream().unwrap());
        let (kept, freed) =
            (pool.malloc(3 << 20, &own).unwrap(), pool.malloc(5 << 20, &own).unwrap());
        let stall = sim.spin(side.handle().raw()).unwrap();
        pool.record_stream(freed, &side).unwrap();
        pool.free(freed, &own).unwrap();
        let mut text = String::new();
        write_segments(&mut text, &[&pool]).unwrap();
        let block = format!(
            "{{\"address\":{},\"size\":{size},\"requested_size\":{size},\
             \"state\":\"active_pending_free\",\"vpmm_state\":\"deferred\"",
            freed.address(),
            size = 5 << 20,
        );
        assert!(text.contains(&block), "{text}");
        let sums = format!(
            "\"allocated_size\":{},\"active_size\":{active},\"requested_size\":{active}",
            3 << 20,
            active = 8 << 20,
        );
        assert!(text.contains(&sums), "{text}");
        stall.release();
        pool.free(kept, &own).unwrap();
    }
}
