//! Redirected connections that are accepted too late: the record of their destination has expired.
//!
//! The tests do not wait for the expiry. While the server is stopped, they rewrite the timestamp of the kernel's record.

use std::fs;
use std::mem::offset_of;
use std::net::SocketAddr;
use std::time::Duration;

use adit_ebpf_abi::{ARRIVAL_AGE_MAX_NS, ARRIVAL_BYTES, ARRIVAL_KEY_BYTES, Arrival};
use adit_redirect::redirect::address;
use aya::maps::{HashMap, Map, MapData, MapInfo};
use rustix::process::{Pid, Signal, kill_process};

use super::redirect::{Scene, scene};
use crate::support::blocking;
use crate::support::client::{Client, Seen};
use crate::support::privilege::{ready, ready_v6};
use crate::support::target::target;

/// REDIRECT_ARRIVALS, truncated as the kernel stores it.
const ARRIVALS: &str = "REDIRECT_ARRIVA";
/// Longer than any step of these tests takes.
const PATIENCE: Duration = Duration::from_secs(60);

type Arrivals = HashMap<MapData, [u8; ARRIVAL_KEY_BYTES], [u8; ARRIVAL_BYTES]>;

/// The map in which the eBPF programs tell a process about redirected connections.
fn arrivals_of(process: u32) -> Arrivals {
    let mut ids: Vec<u32> = fs::read_dir(format!("/proc/{process}/fdinfo"))
        .unwrap()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok())
        .filter_map(|info| {
            let id = info.lines().find_map(|line| line.strip_prefix("map_id:"))?;
            id.trim().parse::<u32>().ok()
        })
        .filter(|id| MapInfo::from_id(*id).is_ok_and(|map| map.name_as_str() == Some(ARRIVALS)))
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let map = MapData::from_id(ids[0]).unwrap();
    HashMap::try_from(Map::LruHashMap(map)).unwrap()
}

/// Whether each thread of a process is stopped.
fn stands_still(process: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    tasks.flatten().all(|task| {
        let stat = fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // Fields after the process name, which may contain any character.
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('T'))
    })
}

/// Calls `asked`, and makes the connection older by `by_ns` before the server accepts it.
fn call_accepted_late(scene: &Scene, asked: SocketAddr, by_ns: u64) -> Result<Seen, String> {
    let process = scene.server.role.id();
    let pid = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    let mut arrivals = arrivals_of(process);
    let mut client = Client::start(Some(scene.clients.path()));
    kill_process(pid, Signal::STOP).unwrap();
    blocking::until("the server stands still", PATIENCE, || {
        stands_still(process).then_some(())
    });
    let calling = std::thread::spawn(move || client.call(asked));
    let (key, mut note) =
        blocking::until("a note", PATIENCE, || arrivals.iter().find_map(Result::ok));
    let arrival = Arrival::from_bytes(note);
    assert_eq!(address(&arrival.destination), asked);
    let earlier = arrival.established_ns.checked_sub(by_ns);
    let earlier = earlier.expect("the machine runs for longer");
    let at = offset_of!(Arrival, established_ns);
    note[at..at + 8].copy_from_slice(&earlier.to_ne_bytes());
    arrivals.insert(key, note, 0).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
    let outcome = calling.join().unwrap();
    assert_eq!(arrivals.iter().count(), 0, "a note is of use once");
    outcome
}

fn refused_when_late(v6: Option<SocketAddr>, rule: &str, asked: &str) {
    let scene = scene(target("127.0.0.1"), v6, &[rule]);
    let asked: SocketAddr = asked.parse().unwrap();
    let refused = "adit_redirect_refused_total{reason=\"unknown_origin\"}";
    let seen = call_accepted_late(&scene, asked, ARRIVAL_AGE_MAX_NS / 4).unwrap();
    assert!(seen.peer == asked && !seen.is_direct(), "{seen:?}");
    assert_eq!(scene.server.metric(refused), 0.0);
    let error = call_accepted_late(&scene, asked, ARRIVAL_AGE_MAX_NS).unwrap_err();
    // The connection may be closed before the client calls `getpeername`.
    let is_over = error.contains("reset") || error.contains("not connected");
    assert!(is_over, "{error}");
    scene.server.metric_is(refused, 1.0);
    // The next call works.
    let mut client = Client::start(Some(scene.clients.path()));
    assert_eq!(client.call(asked).unwrap().peer, asked);
}

/// Limit (redirect): A redirected connection that is not accepted | closed after 10 s
#[test]
fn a_connection_that_is_accepted_after_ten_seconds_is_refused() {
    if ready("connections that are accepted late") {
        refused_when_late(None, "--redirect=198.51.100.0/24", "198.51.100.7:9090");
    }
}

/// Limit (redirect): A redirected connection that is not accepted
#[test]
fn a_connection_of_ipv6_that_is_accepted_after_ten_seconds_is_refused() {
    if ready_v6("connections of IPv6 that are accepted late") {
        let v6 = Some(target("::1"));
        refused_when_late(v6, "--redirect=2001:db8::/32", "[2001:db8::7]:9090");
    }
}
