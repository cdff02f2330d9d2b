//! Where a command line wants to listen: whether it could, now.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{Access, access};

use super::{degraded, missing, ok};
use crate::app::status::model::Capability;
use crate::config::address::{BindAddress, BindHost};
use crate::config::plan::{AgentPlan, FrontendListen, ServerPlan};
use crate::net::listen::{StaleFile, listen};

/// Lines about a server's listeners.
pub(super) fn of_server(plan: &ServerPlan) -> Vec<Capability> {
    let mut lines = Vec::new();
    for frontend in &plan.frontends {
        match &frontend.listen {
            FrontendListen::Unix {
                path,
                delete_existing,
                ..
            } => {
                let stale = StaleFile::of(*delete_existing);
                lines.push(socket("frontend", path, stale));
            }
            FrontendListen::Tcp { bind, .. } => lines.push(port("frontend", bind)),
        }
    }
    let transparent = plan.transparent.bind.iter();
    lines.extend(transparent.map(|bind| port("transparent", bind)));
    lines.push(port("agent-port", &plan.agents.bind));
    lines.extend(both(
        &plan.health,
        &plan.admin,
        plan.admin_socket.as_deref(),
    ));
    lines
}

/// Lines about an agent's.
pub(super) fn of_agent(plan: &AgentPlan) -> Vec<Capability> {
    let targets = plan.target_listeners.iter();
    let mut lines: Vec<Capability> = targets.map(|at| port("target", &at.bind)).collect();
    lines.extend(both(
        &plan.health,
        &plan.admin,
        plan.admin_socket.as_deref(),
    ));
    lines
}

fn both(
    health: &Option<BindAddress>,
    admin: &Option<BindAddress>,
    admin_socket: Option<&Path>,
) -> Vec<Capability> {
    let health = health.iter().map(|bind| port("health-port", bind));
    let admin = admin.iter().map(|bind| port("admin-port", bind));
    let path = admin_socket.map(|path| socket("admin-socket", path, StaleFile::Remove));
    health.chain(admin).chain(path).collect()
}

fn port(name: &str, bind: &BindAddress) -> Capability {
    if bind.port == 0 {
        return ok(name, format!("{bind}: the kernel chooses a port"));
    }
    match bound(bind) {
        Ok(()) => ok(name, format!("{bind} is free")),
        Err(error) => {
            let remedy = match error.kind() {
                std::io::ErrorKind::AddrInUse => {
                    "stop whoever uses that port (this very server, perhaps), or give another one"
                }
                std::io::ErrorKind::AddrNotAvailable => "give an address of this host",
                std::io::ErrorKind::PermissionDenied => {
                    "give a port above 1023, or the capability CAP_NET_BIND_SERVICE"
                }
                _ => "give another address",
            };
            missing(name, format!("cannot listen on {bind}: {error}"), remedy)
        }
    }
}

/// Listens for a moment.
fn bound(bind: &BindAddress) -> std::io::Result<()> {
    let address: SocketAddr = match &bind.host {
        BindHost::Ip(ip) => SocketAddr::new(*ip, bind.port),
        // Both families where there are two.
        BindHost::Any => {
            let v6 = listened((std::net::Ipv6Addr::UNSPECIFIED, bind.port).into());
            return match v6 {
                Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Err(error),
                Err(_no_ipv6) => listened((std::net::Ipv4Addr::UNSPECIFIED, bind.port).into()),
                Ok(()) => Ok(()),
            };
        }
        BindHost::Name(name) => (name.as_str(), bind.port)
            .to_socket_addrs()?
            .next()
            .ok_or(std::io::ErrorKind::AddrNotAvailable)?,
    };
    listened(address)
}

/// As a start would.
fn listened(address: SocketAddr) -> std::io::Result<()> {
    listen(address, |_socket| ()).map(drop)
}

/// Nothing is made or removed: a running process may be behind that path.
fn socket(name: &str, path: &Path, stale: StaleFile) -> Capability {
    let shown = path.display();
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    if let Err(error) = access(dir, Access::WRITE_OK | Access::EXEC_OK) {
        let remedy = if dir.exists() {
            "make the directory writable for this user"
        } else {
            "create the directory"
        };
        return missing(name, format!("{shown}: {}: {error}", dir.display()), remedy);
    }
    match std::fs::symlink_metadata(path) {
        Err(_nothing) => ok(name, format!("{shown} can be made")),
        Ok(there) if !there.file_type().is_socket() => missing(
            name,
            format!("{shown} is there and is no socket"),
            "remove the file, or give another path",
        ),
        Ok(_socket) if stale == StaleFile::Keep => missing(
            name,
            format!("{shown} is there, and --delete-existing-uds-file=false leaves it there"),
            "stop whoever uses it and remove the file, or drop the flag",
        ),
        Ok(_socket) if UnixStream::connect(path).is_ok() => degraded(
            name,
            format!("{shown}: a process listens there; a start would take the path away from it"),
            "stop that process first, or give another path",
        ),
        Ok(_stale) => ok(
            name,
            format!("{shown} was left behind by another process, and is replaced"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::app::status::model::Verdict;

    #[test]
    fn a_port_in_use_is_missing_and_a_free_one_is_not_kept() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let used = listener.local_addr().unwrap().port();
        let bind = BindAddress::new("127.0.0.1", used).unwrap();
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
    fn a_socket_is_looked_at_and_left_as_it_is() {
        use StaleFile::{Keep, Remove};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let verdict = |stale| socket("x", &path, stale).verdict;
        assert_eq!((verdict(Remove), verdict(Keep)), (Verdict::Ok, Verdict::Ok));
        let listener = UnixListener::bind(&path).unwrap();
        assert_eq!(verdict(Remove), Verdict::Degraded);
        assert_eq!(verdict(Keep), Verdict::Missing);
        drop(listener);
        assert_eq!(verdict(Remove), Verdict::Ok);
        let line = socket("x", &path, Keep);
        assert_eq!(line.verdict, Verdict::Missing, "a start would fail");
        assert!(line.text.contains("--delete-existing-uds-file"), "{line:?}");
        assert!(path.exists(), "nothing is removed");
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "precious").unwrap();
        assert_eq!(verdict(Remove), Verdict::Missing);
        let nowhere = dir.path().join("missing/s");
        let line = socket("x", &nowhere, Remove);
        assert_eq!(line.remedy.as_deref(), Some("create the directory"));
    }
}
