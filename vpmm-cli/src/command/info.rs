//! `vpmm info`.

use std::io::Write;

use cuda_sys::types::CUdevice_attribute;
use cuda_sys::version::Version;
use cuda_sys::{LoadError, Runtime};
use serde::Serialize;
use vpmm::{Device, Driver};

use crate::args::InfoArgs;
use crate::bytes::ByteCount;
use crate::device::{DeviceChoice, HandleCosts, Machine, Setup, handle_costs};
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
    name: String,
    compute_capability: String,
    total_bytes: u64,
    /// Needs a context, which a device in exclusive use refuses.
    free_bytes: Option<u64>,
    /// The least bytes of one physical handle.
    granularity_bytes: Option<u64>,
    attributes: Vec<Attribute>,
    /// Where they were asked for.
    costs: Option<Vec<HandleCosts>>,
}

#[derive(Debug, Serialize)]
struct Attribute {
    name: &'static str,
    /// `None` where the driver does not know it.
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
    let (driver, machines) = match args.device {
        DeviceChoice::Auto => match Driver::load() {
            Ok(driver) => {
                let open = |ordinal| driver.device(ordinal).map(Machine::of);
                let count = driver.device_count().map_err(Abort::failure)?;
                let machines = (0..count).map(open).collect::<vpmm::Result<Vec<_>>>();
                let machines = machines.map_err(Abort::failure)?;
                (driver, machines)
            }
            Err(why) => {
                info.no_driver = Some(why.to_string());
                return Ok(info);
            }
        },
        DeviceChoice::Sim => {
            let machine = Machine::simulated(Setup::default()).map_err(Abort::failure)?;
            (machine.driver().clone(), vec![machine])
        }
        DeviceChoice::Cuda(ordinal) => {
            let machine = Machine::cuda(ordinal, Setup::default()).map_err(Abort::failure)?;
            (machine.driver().clone(), vec![machine])
        }
    };
    info.driver = Some(DriverInfo {
        origin: driver.raw().origin().to_owned(),
        cuda_version: Version::from_code(driver.version().map_err(Abort::failure)?).to_string(),
        missing_functions: driver.raw().missing().count(),
    });
    for machine in &machines {
        let mut device = device_info(machine.device()).map_err(Abort::failure)?;
        if args.costs {
            device.costs = Some(handle_costs(machine).map_err(Abort::failure)?);
        }
        info.devices.push(device);
    }
    Ok(info)
}

fn runtime() -> Result<RuntimeInfo, LoadError> {
    let runtime = Runtime::load()?;
    let origin = runtime.origin().to_owned();
    match runtime.version() {
        Ok(version) => Ok(RuntimeInfo { origin, version: version.to_string() }),
        Err(source) => Err(LoadError::Version { origin, source }),
    }
}

fn device_info(device: &Device) -> vpmm::Result<DeviceInfo> {
    use CUdevice_attribute as A;
    let major = device.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = device.attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    let attributes = ATTRIBUTES
        .into_iter()
        .map(|(name, attribute)| Attribute { name, value: device.attribute(attribute).ok() })
        .collect();
    Ok(DeviceInfo {
        ordinal: device.ordinal(),
        name: device.name()?,
        compute_capability: format!("{major}.{minor}"),
        total_bytes: device.total_memory()?,
        free_bytes: device.free_memory().ok(),
        granularity_bytes: device.granularity().ok(),
        attributes,
        costs: None,
    })
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
            device.ordinal, device.name, device.compute_capability
        )?;
        let free = device.free_bytes.map_or_else(|| "?".into(), |b| ByteCount(b).to_string());
        line(out, "memory", &format!("{}, {free} free", ByteCount(device.total_bytes)))?;
        let granularity = device.granularity_bytes.map_or_else(
            || "none".to_owned(),
            |bytes| match bytes % (1 << 20) {
                0 => format!("{} MiB", bytes >> 20),
                _ => format!("{bytes} bytes"),
            },
        );
        line(out, "granularity", &granularity)?;
        for attribute in &device.attributes {
            let value = match attribute.value {
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
