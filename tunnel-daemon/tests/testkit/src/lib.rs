//! What integration tests of several tiers share: waiting, ports, processes, certificates, command lines, scrapes, cgroups and Go programs.

pub mod args;
pub mod blocking;
pub mod certificates;
pub mod cgroup;
pub mod confined;
pub mod go;
pub mod http;
pub mod peers;
pub mod platforms;
pub mod ports;
pub mod process;
pub mod scrape;
pub mod skip;
pub mod wait;
