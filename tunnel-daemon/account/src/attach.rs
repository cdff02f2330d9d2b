//! Loads the accounting program and attaches it to the cgroup of this process.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex};

use adit_ebpf_abi::CLOSED_RING_BYTES;
use aya::maps::{HashMap, Map, MapData, MapError, PerCpuArray, RingBuf};
use aya::{Ebpf, EbpfLoader};

use super::classes::Classes;
use super::reader::Reader;
use super::sockets::{Shared, SocketMap, SocketTable};
use adit_host::cgroup;
use adit_redirect::attach::{Attached, open_cgroup};
use adit_redirect::object::{ACCOUNT_PROGRAM, KernelError, OBJECT};
use adit_telemetry::AccountMetrics;

const SOCKETS: &str = "ACCOUNT_SOCKETS";
const CLOSED: &str = "ACCOUNT_CLOSED";
const OUTCOMES: &str = "ACCOUNT_OUTCOMES";
/// Maps of the object's other programs, which are not loaded here: created as small as possible.
const UNUSED: [&str; 6] = [
    "REDIRECT_RULES",
    "REDIRECT_LISTENERS",
    "REDIRECT_EXEMPT",
    "REDIRECT_ORIGINS",
    "REDIRECT_ARRIVALS",
    "REDIRECT_PROCESSES",
];
const UNUSED_ENTRIES: u32 = 64;

/// Limits of the accounting.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Most label sets, without those named `other`.
    pub series_max: usize,
    /// Bytes of the ring buffer: a power of two, and whole pages.
    pub ring_bytes: u32,
}

impl Options {
    /// This many label sets, with the default ring buffer.
    #[must_use]
    pub fn with_series_max(series_max: usize) -> Self {
        Self {
            series_max,
            ring_bytes: CLOSED_RING_BYTES,
        }
    }
}

/// Starts accounting for connections of this process. Connections are counted while the handle, one of its clones or
/// the reader lives. [`Reader::run`] must run to update the metrics.
///
/// # Errors
/// This host does not allow the program or its maps. Nothing stays attached then.
pub fn start(
    options: Options,
    metrics: AccountMetrics,
) -> Result<(SocketTable, Reader), KernelError> {
    let path = cgroup::own().map_err(|cause| KernelError::Cgroup {
        path: "of this process".to_owned(),
        cause,
    })?;
    start_at(&open_cgroup(&path)?, options, metrics)
}

fn start_at(
    cgroup: &File,
    options: Options,
    metrics: AccountMetrics,
) -> Result<(SocketTable, Reader), KernelError> {
    let mut ebpf = load(options.ring_bytes)?;
    let (sockets, swept) = sockets(&mut ebpf)?;
    let outcomes: PerCpuArray<MapData, u64> = map(&mut ebpf, OUTCOMES, PerCpuArray::try_from)?;
    let closed: RingBuf<MapData> = map(&mut ebpf, CLOSED, RingBuf::try_from)?;
    let mut attached = Attached::default();
    attached.sock_ops(&mut ebpf, ACCOUNT_PROGRAM, cgroup)?;
    let loaded = ebpf
        .program(ACCOUNT_PROGRAM)
        .and_then(|program| program.info().ok());
    let shared = Arc::new(Shared {
        sockets: Mutex::new(sockets),
        classes: Mutex::new(Classes::new(metrics.clone(), options.series_max)),
        outcomes,
        program: loaded.map(|info| info.id()),
        _attached: attached,
    });
    let reader = Reader::new(Arc::clone(&shared), closed, swept, metrics).map_err(|error| {
        KernelError::Map {
            map: CLOSED,
            cause: error.to_string(),
        }
    })?;
    Ok((SocketTable::new(shared), reader))
}

fn load(ring_bytes: u32) -> Result<Ebpf, KernelError> {
    let mut loader = EbpfLoader::new();
    loader.map_max_entries(CLOSED, ring_bytes);
    for unused in UNUSED {
        loader.map_max_entries(unused, UNUSED_ENTRIES);
    }
    Ok(loader.load(OBJECT)?)
}

fn map<M>(
    ebpf: &mut Ebpf,
    name: &'static str,
    typed: impl FnOnce(Map) -> Result<M, MapError>,
) -> Result<M, KernelError> {
    let found = ebpf.take_map(name).ok_or(KernelError::NotInObject(name))?;
    typed(found).map_err(|error| KernelError::Map {
        map: name,
        cause: error.to_string(),
    })
}

/// Two handles of the socket map, so that a sweep does not hold the lock of the other handle.
fn sockets(ebpf: &mut Ebpf) -> Result<(SocketMap, SocketMap), KernelError> {
    let refused = |cause: String| KernelError::Map {
        map: SOCKETS,
        cause,
    };
    let Some(Map::LruHashMap(first)) = ebpf.take_map(SOCKETS) else {
        return Err(KernelError::NotInObject(SOCKETS));
    };
    let descriptor = first.fd().as_fd().try_clone_to_owned();
    let second = MapData::from_fd(descriptor.map_err(|error| refused(error.to_string()))?);
    let second = second.map_err(|error| refused(error.to_string()))?;
    let typed = |map| HashMap::try_from(Map::LruHashMap(map));
    Ok((
        typed(first).map_err(|error| refused(error.to_string()))?,
        typed(second).map_err(|error| refused(error.to_string()))?,
    ))
}
