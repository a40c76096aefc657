//! `vpmm info`.

use std::io::Write;
use std::ops::Range;

use cuda_sys::types::{CUdevice_attribute, CUresult};
use cuda_sys::version::Version;
use cuda_sys::{LoadError, Runtime};
use serde::Serialize;
use vpmm::{Driver, Error};

use crate::args::InfoArgs;
use crate::bytes::ByteCount;
use crate::device::{Bare, DeviceChoice, HandleCosts, Machine, MachineError, Setup, handle_costs};
use crate::exit::{Abort, Exit};

/// Everything that is shown.
#[derive(Debug, Serialize)]
struct Info {
    driver: Option<DriverInfo>,
    /// Why there is no driver.
    no_driver: Option<String>,
    runtime: Option<RuntimeInfo>,
    /// Why there is no runtime.
    no_runtime: Option<String>,
    devices: Vec<DeviceInfo>,
}

#[derive(Debug, Serialize)]
struct DriverInfo {
    origin: String,
    /// The newest CUDA that it supports.
    cuda_version: String,
    /// Functions of the bindings that it lacks.
    missing_functions: usize,
}

#[derive(Debug, Serialize)]
struct RuntimeInfo {
    origin: String,
    version: String,
}

#[derive(Debug, Serialize)]
struct DeviceInfo {
    ordinal: u32,
    name: Option<String>,
    compute_capability: Option<String>,
    total_bytes: Option<u64>,
    /// Needs a context.
    free_bytes: Option<u64>,
    /// The least bytes of one physical handle.
    granularity_bytes: Option<u64>,
    attributes: Vec<Attribute>,
    /// Where they were asked for. They need a context.
    costs: Option<Vec<HandleCosts>>,
    /// Why there is no context: a device that is full, or in exclusive use, gives none.
    no_context: Option<String>,
    /// What the driver failed to tell, with why: it is `None` above.
    refused: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Attribute {
    name: &'static str,
    /// `None` where the driver does not know it, or did not tell.
    value: Option<i32>,
}

const ATTRIBUTES: [(&str, CUdevice_attribute); 10] = {
    use CUdevice_attribute as A;
    [
        ("virtual memory management", A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        (
            "handles as file descriptors",
            A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        ),
        ("fabric handles", A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
        ("GPUDirect RDMA with VMM", A::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
        ("generic compression", A::CU_DEVICE_ATTRIBUTE_GENERIC_COMPRESSION_SUPPORTED),
        ("host NUMA VMM", A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED),
        ("multicast", A::CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED),
        ("memory pools", A::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
        ("memory pool handle types", A::CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES),
        ("unified addressing", A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
    ]
};

pub(super) fn info(args: &InfoArgs, out: &mut dyn Write) -> Result<Exit, Abort> {
    let info = collect(args)?;
    if args.json {
        let line = serde_json::to_string(&info).map_err(Abort::failure)?;
        writeln!(out, "{line}")?;
    } else {
        show(&info, out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

fn collect(args: &InfoArgs) -> Result<Info, Abort> {
    let (runtime, no_runtime) = match runtime() {
        Ok(runtime) => (Some(runtime), None),
        Err(why) => (None, Some(why.to_string())),
    };
    let mut info = Info { driver: None, no_driver: None, runtime, no_runtime, devices: Vec::new() };
    let mut simulated = None;
    let (driver, ordinals) = match args.device {
        DeviceChoice::Auto => match Driver::load() {
            Ok(driver) => {
                let count = driver.device_count().map_err(Abort::failure)?;
                (driver, 0..count)
            }
            Err(why) => {
                info.no_driver = Some(why.to_string());
                return Ok(info);
            }
        },
        DeviceChoice::Sim => {
            let machine = Machine::simulated(Setup::default()).map_err(Abort::failure)?;
            let driver = machine.driver().clone();
            simulated = Some(machine);
            (driver, 0..1)
        }
        DeviceChoice::Cuda(ordinal) => {
            let unusable = |source| Abort::failure(MachineError::Cuda { ordinal, source });
            let driver = Driver::load().map_err(unusable)?;
            Bare::find(&driver, ordinal).map_err(unusable)?;
            (driver, ordinal..ordinal.saturating_add(1))
        }
    };
    info.driver = Some(DriverInfo {
        origin: driver.raw().origin().to_owned(),
        cuda_version: Version::from_code(driver.version().map_err(Abort::failure)?).to_string(),
        missing_functions: driver.raw().missing().count(),
    });
    let devices = collect_of(&driver, ordinals, simulated, args.costs);
    info.devices = devices.map_err(Abort::failure)?;
    Ok(info)
}

/// `simulated` is the one device's machine, where there is one already.
fn collect_of(
    driver: &Driver,
    ordinals: Range<u32>,
    mut simulated: Option<Machine>,
    costs: bool,
) -> vpmm::Result<Vec<DeviceInfo>> {
    let device = |ordinal| {
        let mut device = device_info(driver, ordinal)?;
        let opened = match simulated.take() {
            Some(machine) => Ok(machine),
            None => driver.device(ordinal).map(Machine::of),
        };
        device.look_into(opened, costs);
        Ok(device)
    };
    ordinals.map(device).collect()
}

fn runtime() -> Result<RuntimeInfo, LoadError> {
    let runtime = Runtime::load()?;
    let origin = runtime.origin().to_owned();
    match runtime.version() {
        Ok(version) => Ok(RuntimeInfo { origin, version: version.to_string() }),
        Err(source) => Err(LoadError::Version { origin, source }),
    }
}

/// What there is to know without a context.
fn device_info(driver: &Driver, ordinal: u32) -> vpmm::Result<DeviceInfo> {
    use CUdevice_attribute as A;
    let device = Bare::find(driver, ordinal)?;
    let mut refused = Vec::new();
    let major = device.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    let minor = device.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    let capability = major.and_then(|major| Ok(format!("{major}.{}", minor?)));
    let attributes = ATTRIBUTES.into_iter().map(|(name, attribute)| {
        let value = match device.attribute(attribute) {
            Err(Error::Driver { code: CUresult::CUDA_ERROR_INVALID_VALUE, .. }) => None,
            told => told_or(&mut refused, name, told),
        };
        Attribute { name, value }
    });
    let attributes = attributes.collect();
    Ok(DeviceInfo {
        ordinal,
        name: told_or(&mut refused, "name", device.name()),
        compute_capability: told_or(&mut refused, "compute capability", capability),
        total_bytes: told_or(&mut refused, "memory", device.total_memory()),
        free_bytes: None,
        granularity_bytes: None,
        attributes,
        costs: None,
        no_context: None,
        refused,
    })
}

/// An answer, or a note of what was asked and why there is none.
fn told_or<T>(refused: &mut Vec<String>, what: &str, told: vpmm::Result<T>) -> Option<T> {
    told.map_err(|why| refused.push(format!("{what}: {why}"))).ok()
}

impl DeviceInfo {
    fn has_refused(&self, what: &str) -> bool {
        let of_it = |why: &String| why.strip_prefix(what).is_some_and(|rest| rest.starts_with(':'));
        self.refused.iter().any(of_it)
    }

    /// Adds what needs a context, or why there is none.
    fn look_into(&mut self, opened: vpmm::Result<Machine>, costs: bool) {
        let looked = opened.and_then(|machine| {
            let free = machine.device().free_memory();
            self.free_bytes = told_or(&mut self.refused, "free memory", free);
            self.granularity_bytes = machine.device().granularity().ok();
            if costs {
                self.costs = Some(handle_costs(&machine)?);
            }
            Ok(())
        });
        self.no_context = looked.err().map(|why| why.to_string());
    }
}

fn show(info: &Info, out: &mut dyn Write) -> std::io::Result<()> {
    match (&info.driver, &info.no_driver) {
        (Some(driver), _) => {
            write!(out, "driver: CUDA {} ({}", driver.cuda_version, driver.origin)?;
            if driver.missing_functions > 0 {
                write!(out, ", without {} functions of CUDA 13.0", driver.missing_functions)?;
            }
            writeln!(out, ")")?;
        }
        (None, why) => {
            let why = why.as_deref().unwrap_or_default();
            writeln!(out, "There is no CUDA driver that can be used on this machine: {why}")?;
            writeln!(out, "The simulator works all the same: --device sim.")?;
        }
    }
    match (&info.runtime, &info.no_runtime) {
        (Some(runtime), _) => {
            writeln!(out, "runtime: CUDA {} ({})", runtime.version, runtime.origin)?
        }
        (None, why) => {
            let why = why.as_deref().unwrap_or_default();
            writeln!(out, "runtime: none, and none is needed: {why}")?;
        }
    }
    for device in &info.devices {
        writeln!(
            out,
            "\ndevice {}: {}, compute capability {}",
            device.ordinal,
            device.name.as_deref().unwrap_or("?"),
            device.compute_capability.as_deref().unwrap_or("?")
        )?;
        let bytes = |told: Option<u64>| told.map_or("?".into(), |b| ByteCount(b).to_string());
        let (total, free) = (bytes(device.total_bytes), bytes(device.free_bytes));
        line(out, "memory", &format!("{total}, {free} free"))?;
        let granularity = device.granularity_bytes.map_or_else(
            || if device.no_context.is_some() { "?" } else { "none" }.to_owned(),
            |bytes| match bytes % (1 << 20) {
                0 => format!("{} MiB", bytes >> 20),
                _ => format!("{bytes} bytes"),
            },
        );
        line(out, "granularity", &granularity)?;
        if let Some(why) = &device.no_context {
            line(out, "no context", why)?;
        }
        for why in &device.refused {
            line(out, "not told", why)?;
        }
        for attribute in &device.attributes {
            let value = match attribute.value {
                None if device.has_refused(attribute.name) => "?".to_owned(),
                None => "unknown to the driver".to_owned(),
                Some(value) if attribute.name.ends_with("types") => format!("{value:#x}"),
                Some(0) => "no".to_owned(),
                Some(_) => "yes".to_owned(),
            };
            line(out, attribute.name, &value)?;
        }
        if let Some(costs) = &device.costs {
            show_costs(costs, out)?;
        }
    }
    Ok(())
}

fn show_costs(costs: &[HandleCosts], out: &mut dyn Write) -> std::io::Result<()> {
    writeln!(out, "  driver calls, microseconds for each handle:")?;
    for HandleCosts { handle_bytes, handles, each, error } in costs {
        let name = format!("{handles} of {} MiB", handle_bytes >> 20);
        let text = match each {
            Some(each) => format!(
                "create {:.2}, map {:.2}, set access {:.2}, unmap {:.2}, release {:.2}",
                each.create_us, each.map_us, each.set_access_us, each.unmap_us, each.release_us
            ),
            None => error.clone().unwrap_or_default(),
        };
        line(out, &name, &text)?;
    }
    Ok(())
}

fn line(out: &mut dyn Write, name: &str, value: &str) -> std::io::Result<()> {
    writeln!(out, "  {name:<28}{value}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What one device does not tell hides neither the rest of it nor the others.
    #[test]
    fn what_a_device_refuses_is_told() {
        let simulator = cuda_sim::Simulator::builder().devices(2).build().unwrap();
        let driver = Driver::new(simulator.driver()).unwrap();
        let functions = [
            ("cuDeviceGetAttribute", 2 + ATTRIBUTES.len() as u64),
            ("cuDeviceGetName", 1),
            ("cuDeviceTotalMem_v2", 1),
            ("cuMemGetInfo_v2", 1),
        ];
        for (refused, calls) in functions {
            for nth in 1..=calls {
                simulator.fail_nth(refused, nth, CUresult::CUDA_ERROR_UNKNOWN);
                let mut info = collect_of(&driver, 0..2, None, false).unwrap();
                let (whole, lacking) = (info.pop().unwrap(), info.pop().unwrap());
                assert!(whole.refused.is_empty(), "{whole:?}");
                assert_eq!(lacking.refused.len(), 1, "{lacking:?}");
                assert!(lacking.refused[0].contains(refused), "{lacking:?}");
                let lacks = [
                    lacking.name.is_none(),
                    lacking.compute_capability.is_none(),
                    lacking.total_bytes.is_none(),
                    lacking.free_bytes.is_none(),
                    lacking.attributes.iter().any(|attribute| attribute.value.is_none()),
                ];
                assert_eq!(lacks.iter().filter(|lacks| **lacks).count(), 1, "{lacking:?}");
                let text = shown(lacking);
                assert!(text.contains(refused) && text.contains('?'), "{text}");
            }
        }
        // An older driver's answer for what it does not know.
        simulator.fail_nth("cuDeviceGetAttribute", 3, CUresult::CUDA_ERROR_INVALID_VALUE);
        let info = collect_of(&driver, 0..1, None, false).unwrap().remove(0);
        assert!(info.refused.is_empty() && info.attributes[0].value.is_none(), "{info:?}");
        assert!(shown(info).contains("unknown to the driver"));
    }

    fn shown(device: DeviceInfo) -> String {
        let none = || Some("none".to_owned());
        let (no_driver, no_runtime) = (none(), none());
        let (driver, runtime, devices) = (None, None, vec![device]);
        let mut out = Vec::new();
        show(&Info { driver, no_driver, runtime, no_runtime, devices }, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// A context takes memory of the device.
    #[test]
    fn a_device_that_is_full_is_shown() {
        let simulator = cuda_sim::Simulator::builder().devices(2).build().unwrap();
        let driver = Driver::new(simulator.driver()).unwrap();
        let retain = "cuDevicePrimaryCtxRetain";
        simulator.fail_nth(retain, 1, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let mut info = collect_of(&driver, 0..2, None, true).unwrap();
        let (free, full) = (info.pop().unwrap(), info.pop().unwrap());
        assert!(full.no_context.as_ref().unwrap().contains(retain), "{full:?}");
        assert!(full.free_bytes.is_none() && full.costs.is_none(), "{full:?}");
        assert_eq!((&full.name, full.total_bytes), (&free.name, free.total_bytes));
        assert_eq!(full.attributes[0].value, Some(1));
        assert!(free.no_context.is_none() && free.free_bytes.is_some(), "{free:?}");
        assert!(free.costs.is_some(), "{free:?}");
        assert!(collect_of(&driver, 0..3, None, false).is_err(), "one that is not there");

        let text = shown(full);
        assert!(text.contains("? free") && text.contains(retain), "{text}");
    }
}
