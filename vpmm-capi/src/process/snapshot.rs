//! What the process's pools hold and did, as JSON.

use std::ffi::c_void;
use std::fmt::{self, Write};

use super::{pools, trace};
use crate::guard::guard;
use crate::snapshot::{Out, vpmm_write, write_segments};
use crate::status::vpmm_status;

fn write_all(out: &mut impl Write) -> fmt::Result {
    let pools = pools();
    out.write_str("{")?;
    // First, so that a block that was allocated meanwhile is in the blocks rather than the events.
    let events = trace::events();
    write_segments(out, &pools)?;
    let devices = pools.iter().map(|pool| pool.device().ordinal() + 1).max().unwrap_or(0);
    out.write_str(",\"device_traces\":[")?;
    for device in 0..devices {
        out.write_str(if device == 0 { "[" } else { ",[" })?;
        let mut comma = "";
        for event in events.iter().filter(|event| event.device == device) {
            let address =
                if event.action == trace::Action::OutOfMemory { "device_free" } else { "addr" };
            write!(
                out,
                "{comma}{{\"action\":\"{}\",\"{address}\":{},\"size\":{},\"stream\":{},\
                 \"time_us\":{},\"where\":{},\"frames\":[]}}",
                event.action.name(),
                event.address,
                event.bytes,
                event.stream,
                event.micros,
                event.at
            )?;
            comma = ",";
        }
        out.write_str("]")?;
    }
    out.write_str("],\"allocator_settings\":{\"backend\":\"vpmm\"},\"external_annotations\":[]}")
}

/// As `vpmm_pool_snapshot`, of all the process's pools, with what `vpmm_process_record_history` kept, by
/// device, as `device_traces`. In an event `where` is what the callback answered.
///
/// # Safety
/// As in `vpmm_pool_snapshot`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_snapshot(
    write: vpmm_write,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let mut out = unsafe { Out::new(write, context) }?;
        // It collects text: nothing in it fails.
        let _ = write_all(&mut out);
        Ok(())
    })
}
