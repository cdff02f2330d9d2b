//! Addresses and sockets of a command line: whether a start could listen there now.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::line::{degraded, missing, ok};
use crate::status::model::{Capability, Verdict};
use adit_config::address::{BindAddress, BindHost};
use adit_config::plan::{
    AdminSocketPlan, AgentPlan, ClientsPlan, FrontendListen, FrontendPlan, ProxyPlan, ServerPlan,
};
use adit_net::listen::{StaleFile, listen};

/// The TCP addresses taken so far in the order of a start, each with the name of its line.
#[derive(Default)]
struct Ports(Vec<(&'static str, SocketAddr)>);

/// Lines about a server's listeners.
pub(super) fn of_server(plan: &ServerPlan) -> Vec<Capability> {
    let mut ports = Ports::default();
    let mut lines = ports.of_clients(&plan.clients);
    if let Some(bind) = &plan.transparent.bind {
        lines.push(ports.line("transparent", bind));
    }
    let agents = plan.agents.port.iter();
    lines.extend(agents.map(|port| ports.line("agent-port", &port.bind)));
    let peers = plan.peers.iter().filter_map(|peers| peers.bind.as_ref());
    lines.extend(peers.map(|bind| ports.line("peer-port", bind)));
    lines.extend(ports.probes(&plan.health, &plan.admin, plan.compat));
    lines.extend(admin_socket(&plan.admin_socket));
    lines
}

/// Lines about an agent's listeners.
pub(super) fn of_agent(plan: &AgentPlan) -> Vec<Capability> {
    let (mut lines, mut ports) = (Vec::new(), Ports::default());
    for target in &plan.target_listeners {
        lines.push(ports.line("target", &target.bind));
    }
    lines.extend(ports.probes(&plan.health, &plan.admin, plan.compat));
    lines.extend(admin_socket(&plan.admin_socket));
    lines
}

fn admin_socket(plan: &AdminSocketPlan) -> Option<Capability> {
    const NAME: &str = "admin-socket";
    let judged = |path: &PathBuf| socket(path, StaleFile::RemoveDead).named(NAME);
    match plan {
        AdminSocketPlan::Off => None,
        AdminSocketPlan::At(path) => Some(judged(path)),
        AdminSocketPlan::Default(places) => {
            let can_be_made = |path: &&PathBuf| {
                let above = path.parent().and_then(Path::parent);
                let may_make = |folder| access(folder, Access::WRITE_OK | Access::EXEC_OK).is_ok();
                path.parent().is_some_and(|folder| !folder.exists()) && above.is_some_and(may_make)
            };
            if let Some(path) = places.iter().find(can_be_made) {
                return Some(ok(format!("{} can be made", path.display())).named(NAME));
            }
            let lines: Vec<Capability> = places.iter().map(judged).collect();
            let usable = lines.iter().find(|line| line.verdict == Verdict::Ok);
            if let Some(line) = usable {
                return Some(line.clone());
            }
            // No flag asks for it.
            lines.into_iter().next().map(|line| optional(line).info())
        }
    }
}

/// The line of a listener without which a start goes on, as upstream's programs do.
fn optional(line: Capability) -> Capability {
    if line.verdict != Verdict::Missing {
        return line;
    }
    Capability {
        verdict: Verdict::Degraded,
        text: format!("{}; a start goes on without it", line.text),
        ..line
    }
}

/// Lines about a proxy's listeners.
pub(super) fn of_proxy(plan: &ProxyPlan) -> Vec<Capability> {
    let mut ports = Ports::default();
    let mut lines = ports.of_clients(&plan.clients);
    lines.extend(ports.probes(&plan.health, &None, false));
    lines.extend(admin_socket(&plan.admin_socket));
    lines
}

impl Ports {
    /// Lines about frontends.
    fn of_clients(&mut self, clients: &ClientsPlan) -> Vec<Capability> {
        let line = |frontend: &FrontendPlan| match &frontend.listen {
            FrontendListen::Unix {
                path,
                delete_existing,
            } => socket(path, StaleFile::of(*delete_existing)).named("frontend"),
            FrontendListen::Tcp { bind, .. } => self.line("frontend", bind),
        };
        clients.frontends.iter().map(line).collect()
    }

    /// Lines about the health and admin listeners, which a start opens last.
    fn probes(
        &mut self,
        health: &Option<BindAddress>,
        admin: &Option<BindAddress>,
        compat: bool,
    ) -> Vec<Capability> {
        let health = health.iter().map(|bind| ("health-port", bind));
        let admin = admin.iter().map(|bind| ("admin-port", bind));
        let lines = health.chain(admin).map(|(name, bind)| {
            let line = self.line(name, bind);
            if compat { optional(line) } else { line }
        });
        lines.collect()
    }

    fn line(&mut self, name: &'static str, bind: &BindAddress) -> Capability {
        let line = match self.take(name, bind) {
            Ok(()) if bind.port == 0 => ok(format!("{bind}: the kernel chooses a port")),
            Ok(()) => ok(format!("{bind} is free")),
            Err((why, remedy)) => missing(format!("cannot listen on {bind}: {why}"), remedy),
        };
        line.named(name)
    }

    /// # Errors
    /// Why a start could not listen on this address, and the remedy.
    fn take(
        &mut self,
        name: &'static str,
        bind: &BindAddress,
    ) -> Result<(), (String, &'static str)> {
        if bind.port == 0 {
            return Ok(());
        }
        let address = bound(bind).map_err(|error| {
            let remedy = match error.kind() {
                io::ErrorKind::AddrInUse => {
                    "stop the process that uses the port (perhaps this server or agent, already running), or give another one"
                }
                io::ErrorKind::AddrNotAvailable => "give an address of this host",
                io::ErrorKind::PermissionDenied => {
                    "give a port above 1023, or the capability CAP_NET_BIND_SERVICE"
                }
                _ => "give another address",
            };
            (error.to_string(), remedy)
        })?;
        if let Some((other, taken)) = self.0.iter().find(|(_, taken)| overlap(address, *taken)) {
            let why = format!("{other} of this command line has {taken}, which overlaps");
            return Err((why, "give one of the two another port"));
        }
        self.0.push((name, address));
        Ok(())
    }
}

/// Whether the kernel refuses the second of two listeners at these addresses. The IPv6 wildcard address takes IPv4, too.
fn overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let covers = |all: IpAddr, ip: IpAddr| all.is_unspecified() && (all.is_ipv6() || ip.is_ipv4());
    let (a, b) = (one.ip(), other.ip());
    one.port() == other.port() && (a == b || covers(a, b) || covers(b, a))
}

/// Listens for a moment and returns the address.
fn bound(bind: &BindAddress) -> io::Result<SocketAddr> {
    let address: SocketAddr = match &bind.host {
        BindHost::Ip(ip) => SocketAddr::new(*ip, bind.port),
        // Both address families on hosts with IPv6.
        BindHost::Any => {
            let v6 = listened((Ipv6Addr::UNSPECIFIED, bind.port).into());
            return match v6 {
                Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                    listened((Ipv4Addr::UNSPECIFIED, bind.port).into())
                }
                bound => bound,
            };
        }
        BindHost::Name(name) => (name.as_str(), bind.port)
            .to_socket_addrs()?
            .next()
            .ok_or(io::ErrorKind::AddrNotAvailable)?,
    };
    listened(address)
}

/// Listens as a start would.
fn listened(address: SocketAddr) -> io::Result<SocketAddr> {
    listen(address, |_socket| ()).map(|_closed| address)
}

/// Creates and removes nothing: a running process may use that path.
fn socket(path: &Path, stale: StaleFile) -> Capability {
    const FIRST: &str = "stop that process first, or give another path";
    let shown = path.display();
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    if let Err(error) = access(dir, Access::WRITE_OK | Access::EXEC_OK) {
        let remedy = match dir.exists() {
            true => "make the directory writable for this user",
            false => "create the directory",
        };
        return missing(format!("{shown}: {}: {error}", dir.display()), remedy);
    }
    let Ok(there) = std::fs::symlink_metadata(path) else {
        return ok(format!("{shown} can be made"));
    };
    if !there.file_type().is_socket() {
        return missing(
            format!("{shown} is there and is no socket"),
            "remove the file, or give another path",
        );
    }
    match (
        stale,
        stale != StaleFile::Keep && UnixStream::connect(path).is_ok(),
    ) {
        (StaleFile::Keep, _) => missing(
            format!("{shown} is there, and --delete-existing-uds-file=false leaves it there"),
            "stop the process that uses the socket and remove the file, or drop the flag",
        ),
        (StaleFile::RemoveDead, true) => missing(
            format!("{shown}: another process listens on this socket, and keeps it"),
            FIRST,
        ),
        (StaleFile::Remove, true) => degraded(
            format!(
                "{shown}: another process listens on this socket; starting would replace the socket file"
            ),
            FIRST,
        ),
        (_, false) => ok(format!(
            "{shown} was left behind by another process, and is replaced"
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn port(name: &'static str, bind: &BindAddress) -> Capability {
        Ports::default().line(name, bind)
    }

    #[test]
    fn a_used_port_is_reported_and_a_free_port_is_released() {
        // A separate loopback address, so that no other process takes the port while it is free.
        let listener = TcpListener::bind("127.0.0.5:0").unwrap();
        let used = listener.local_addr().unwrap().port();
        let bind = BindAddress::new("127.0.0.5", used).unwrap();
        let line = port("x", &bind);
        assert_eq!(line.verdict, Verdict::Missing, "{line:?}");
        assert!(line.text.contains(&used.to_string()));
        let any = BindAddress::new("", used).unwrap();
        assert_eq!(port("x", &any).verdict, Verdict::Missing);
        drop(listener);
        for _twice in 0..2 {
            let line = port("x", &bind);
            assert_eq!(line.verdict, Verdict::Ok, "{line:?}");
        }
        let elsewhere = BindAddress::new("192.0.2.1", 8091).unwrap();
        assert_eq!(port("x", &elsewhere).verdict, Verdict::Missing);
    }

    #[test]
    fn probe_ports_in_use_are_degraded_in_compat_mode() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let used = listener.local_addr().unwrap().port();
        let bind = Some(BindAddress::new("127.0.0.1", used).unwrap());
        for (compat, verdict) in [(true, Verdict::Degraded), (false, Verdict::Missing)] {
            let lines = Ports::default().probes(&bind, &bind, compat);
            let found: Vec<_> = lines.iter().map(|line| line.verdict).collect();
            assert_eq!(found, [verdict; 2], "{lines:?}");
        }
    }

    /// The kernel's verdict on two addresses, in either order.
    #[test]
    fn overlapping_listen_addresses_are_recognised() {
        for (one, other, expected) in [
            ("127.0.0.1:1", "127.0.0.1:1", true),
            ("127.0.0.1:1", "127.0.0.1:2", false),
            ("127.0.0.1:1", "127.0.0.2:1", false),
            ("0.0.0.0:1", "127.0.0.1:1", true),
            ("[::]:1", "127.0.0.1:1", true),
            ("[::]:1", "0.0.0.0:1", true),
            ("[::]:1", "[::1]:1", true),
            ("0.0.0.0:1", "[::1]:1", false),
            ("127.0.0.1:1", "[::1]:1", false),
        ] {
            let (one, other) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!(overlap(one, other), expected, "{one} {other}");
            assert_eq!(overlap(other, one), expected, "{other} {one}");
        }
    }

    #[test]
    fn overlapping_listeners_of_one_command_line_are_reported() {
        // While this listener exists, no other process gets the port on all addresses.
        let holder = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = holder.local_addr().unwrap().port();
        let bind = BindAddress::new("127.0.0.4", port).unwrap();
        let mut ports = Ports::default();
        let first = ports.line("one", &bind);
        assert_eq!(first.verdict, Verdict::Ok, "{first:?}");
        let second = ports.line("two", &bind);
        assert_eq!(second.verdict, Verdict::Missing, "{second:?}");
        assert_eq!(optional(second.clone()).verdict, Verdict::Degraded);
        assert!(second.text.contains("one of this command line"));
    }

    #[test]
    fn a_socket_is_checked_and_not_removed() {
        use StaleFile::{Keep, Remove, RemoveDead};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let verdict = |stale| socket(&path, stale).verdict;
        assert_eq!((verdict(Remove), verdict(Keep)), (Verdict::Ok, Verdict::Ok));
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(verdict(Remove), Verdict::Degraded);
        assert_eq!(verdict(Keep), Verdict::Missing);
        assert_eq!(verdict(RemoveDead), Verdict::Missing);
        drop(listener);
        assert_eq!(verdict(RemoveDead), Verdict::Ok);
        assert_eq!(verdict(Remove), Verdict::Ok);
        let line = socket(&path, Keep);
        assert_eq!(line.verdict, Verdict::Missing, "a start would fail");
        assert!(line.text.contains("--delete-existing-uds-file"), "{line:?}");
        assert!(path.exists(), "nothing is removed");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(verdict(Remove), Verdict::Missing);
        let nowhere = dir.path().join("missing/s");
        let line = socket(&nowhere, Remove);
        assert_eq!(line.remedy.as_deref(), Some("create the directory"));
    }
}
