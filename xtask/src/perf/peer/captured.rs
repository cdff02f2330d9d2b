//! Our server with its redirect: the load knows of no proxy, and its calls are captured by its cgroup.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::pair::{Linked, Pair};
use super::{Peer, Place, Route, TARGETS, wait_for_echo};
use crate::perf::process::Site;
use crate::perf::programs::Programs;
use crate::perf::scenario::Way;

/// See the module.
pub(super) struct Captured {
    pair: Pair,
    /// Where cgroup2 is mounted.
    cgroups: PathBuf,
}

impl Captured {
    /// The binary that `adit` measures.
    ///
    /// # Errors
    /// It could not be built, or there is no cgroup2.
    pub(super) fn find(programs: &Programs) -> anyhow::Result<Self> {
        Ok(Self {
            pair: Pair::find(programs)?,
            cgroups: cgroups()?,
        })
    }
}

/// Where cgroup2 is mounted.
///
/// # Errors
/// It is not.
pub(super) fn cgroups() -> anyhow::Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/mounts")?;
    cgroup2(&mounts).context("no cgroup2 is mounted")
}

/// Where it is mounted, of the lines of `/proc/mounts`.
fn cgroup2(mounts: &str) -> Option<PathBuf> {
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        let (at, kind) = (words.next()?, words.next()?);
        (kind == "cgroup2").then(|| at.into())
    })
}

/// A cgroup of our own; gone when nobody is in it any more.
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// # Errors
    /// We may not.
    pub(super) fn new(below: &Path) -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let path = below.join(format!("adit-perf-{}-{number}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("creating {}", path.display()))?;
        Ok(Self(path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _kept_while_in_use = fs::remove_dir(&self.0);
    }
}

impl Peer for Captured {
    fn name(&self) -> &str {
        "adit-redirect"
    }

    fn version(&self) -> String {
        let version = self.pair.version();
        format!("{version}, clients captured by their cgroup")
    }

    fn ways(&self, _asked: &[Way]) -> Vec<Way> {
        vec![Way::Tcp]
    }

    fn start(&self, site: &Site, way: Way) -> anyhow::Result<Route> {
        let (target, targets) = site.targets(site.far(), site.far_host())?;
        let cgroup = Cgroup::new(&self.cgroups)?;
        let mut of_server = vec![format!("--redirect-cgroup={}", cgroup.path().display())];
        for name in TARGETS {
            let at = targets.get(name).context("the targets have this one")?;
            of_server.push(format!("--redirect={at}"));
        }
        let Linked {
            server,
            agent,
            server_health,
            ..
        } = self.pair.start(site, &of_server, &[])?;
        ensure_active(server_health)?;
        let route = Route {
            way,
            frontend: None,
            targets,
            processes: vec![
                ("server".to_owned(), server.id()),
                ("agent".to_owned(), agent.id()),
            ],
            running: vec![agent, server, target],
            place: Place::Cgroup(cgroup),
        };
        wait_for_echo(site, &route)?;
        Ok(route)
    }
}

/// Asks the health port of a server or an agent for its redirect. Without one the load would reach its targets directly, and be
/// measured as if it had not.
///
/// # Errors
/// Why nothing is captured.
pub(super) fn ensure_active(health: u16) -> anyhow::Result<()> {
    let state = ask(health, "/readyz?verbose")?;
    ensure!(
        state.contains("[+]redirect active"),
        "nothing is captured here: {}",
        state
            .lines()
            .find(|line| line.contains("redirect"))
            .unwrap_or(&state)
    );
    Ok(())
}

/// Asks a health port.
///
/// # Errors
/// It does not answer.
pub(super) fn ask(port: u16, path: &str) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cgroup2_is_found_among_other_mounts() {
        let mounts = "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/cpu cgroup rw 0 0\n\
                      cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(cgroup2(mounts), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(cgroup2("proc /proc proc rw 0 0\n"), None);
    }
}
