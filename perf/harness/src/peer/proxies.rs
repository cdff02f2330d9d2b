//! Proxies beside a program: `adit proxy` and HyperShift's design before the same server and agent, and as baselines two proxies that
//! dial the targets themselves.

use std::fs;
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use adit_perf_plan::Dialect;
use xtask_kit::net::free_port;

use super::{Peer, Route, installed};
use crate::process::Site;
use crate::programs::Programs;

/// Connection limit of tinyproxy, whose default is 100.
const CONNECTIONS_MAX: usize = 9_500;

/// How a proxy is started.
struct Proxy {
    program: PathBuf,
    /// The `adit` binary of the server and agent behind the proxy; `None` if it dials the targets itself.
    tunnel: Option<PathBuf>,
    /// Its arguments for a port to listen on, and the port of the server's frontend.
    args: fn(&Site, Dialect, u16, u16) -> anyhow::Result<Vec<String>>,
}

/// `adit proxy`.
///
/// # Errors
/// The binary cannot be built.
pub(super) fn adit(programs: &Programs) -> anyhow::Result<Peer> {
    let program = programs.adit()?;
    let version = format!(
        "{}: `adit proxy`, server and agent",
        programs.adit_version()
    );
    let proxy = Proxy {
        tunnel: Some(program.clone()),
        program,
        args: |site, dialect, port, server| {
            let frontend = if dialect == Dialect::Socks5 {
                "socks5"
            } else {
                "http-proxy"
            };
            Ok(vec![
                "proxy".to_owned(),
                format!("--frontend={frontend}=tcp:127.0.0.1:{port}"),
                format!("--proxy-server-host=127.0.0.1:{server}"),
                format!("--ca-cert={}", site.at("ca.pem")),
                format!("--client-cert={}", site.at("agent.pem")),
                format!("--client-key={}", site.at("agent.key")),
                // The other proxies have neither.
                "--health-port=off".to_owned(),
                "--admin-socket=off".to_owned(),
            ])
        },
    };
    Ok(proxy.into_peer(
        "adit-proxy",
        version,
        &[Dialect::HttpConnect, Dialect::Socks5],
    ))
}

/// A proxy of HyperShift's design before Adit's server and agent.
///
/// # Errors
/// A program cannot be built.
pub(super) fn hypershift(programs: &Programs) -> anyhow::Result<Peer> {
    let version =
        "perf/go-proxy, of HyperShift's design, before the server and agent of adit-proxy";
    let proxy = Proxy {
        program: programs.go_proxy()?,
        tunnel: Some(programs.adit()?),
        args: |site, dialect, port, server| {
            let name = if dialect == Dialect::Socks5 {
                "konnectivity-socks5-proxy"
            } else {
                "konnectivity-https-proxy"
            };
            Ok(vec![
                name.to_owned(),
                format!("--serving-port={port}"),
                "--konnectivity-hostname=127.0.0.1".to_owned(),
                format!("--konnectivity-port={server}"),
                format!("--ca-cert-path={}", site.at("ca.pem")),
                format!("--tls-cert-path={}", site.at("agent.pem")),
                format!("--tls-key-path={}", site.at("agent.key")),
            ])
        },
    };
    Ok(proxy.into_peer(
        "hypershift-proxy",
        version.to_owned(),
        &[Dialect::HttpConnect, Dialect::Socks5],
    ))
}

/// microsocks, without a tunnel.
///
/// # Errors
/// It is not installed.
pub(super) fn microsocks() -> anyhow::Result<Peer> {
    // It tells its version nowhere.
    let (program, _version) = installed("microsocks", "-h", "microsocks")?;
    let proxy = Proxy {
        program,
        tunnel: None,
        args: |_site, _dialect, port, _server| {
            let args = ["-i", "127.0.0.1", "-p", &port.to_string()];
            Ok(args.map(str::to_owned).to_vec())
        },
    };
    let version = "microsocks of this host, no tunnel: it dials the target";
    Ok(proxy.into_peer("microsocks", version.to_owned(), &[Dialect::Socks5]))
}

/// tinyproxy, without a tunnel.
///
/// # Errors
/// It is not installed.
pub(super) fn tinyproxy() -> anyhow::Result<Peer> {
    let (program, version) = installed("tinyproxy", "-v", "tinyproxy-bin")?;
    let proxy = Proxy {
        program,
        tunnel: None,
        args: |site, _dialect, port, _server| {
            let file = site.at("tinyproxy.conf");
            let configuration = format!(
                "Listen 127.0.0.1\nPort {port}\nTimeout 3600\nMaxClients {CONNECTIONS_MAX}\nLogLevel Warning\n"
            );
            fs::write(&file, configuration)?;
            Ok(vec!["-d".to_owned(), "-c".to_owned(), file])
        },
    };
    let version = format!("{version}, no tunnel: it dials the target");
    Ok(proxy.into_peer("tinyproxy", version, &[Dialect::HttpConnect]))
}

impl Proxy {
    fn into_peer(self, name: &str, version: String, dialects: &'static [Dialect]) -> Peer {
        Peer {
            name: name.to_owned(),
            version,
            dialects,
            may_span: false,
            start: Box::new(move |site, dialect| self.start(site, dialect)),
        }
    }

    /// Starts the proxy with targets behind it, and waits until it listens.
    ///
    /// # Errors
    /// A program cannot be started, or is not ready in time.
    fn start(&self, site: &Site, dialect: Dialect) -> anyhow::Result<Route> {
        let mut route = Route::to_far(site)?;
        route.dialect = dialect;
        let server = match &self.tunnel {
            Some(adit) => start_tunnel(&mut route, site, adit)?,
            None => 0,
        };
        let port = free_port()?;
        let args = (self.args)(site, dialect, port, server)?;
        route.start(site, "proxy", &site.near, &self.program, &args)?;
        let address = format!("127.0.0.1:{port}");
        site.wait_for("the proxy", || TcpStream::connect(&address).is_ok())?;
        route.frontend = Some(address);
        Ok(route)
    }
}

/// Starts a server and an agent, and waits until they are linked. Returns the port of the server's frontend for proxies.
fn start_tunnel(route: &mut Route, site: &Site, adit: &Path) -> anyhow::Result<u16> {
    let frontend = free_port()?;
    let server = vec![
        "server".to_owned(),
        format!("--frontend=http-connect=tcp:127.0.0.1:{frontend}"),
        format!("--server-cert={}", site.at("server.pem")),
        format!("--server-key={}", site.at("server.key")),
        format!("--server-ca-cert={}", site.at("ca.pem")),
        "--admin-port=off".to_owned(),
    ];
    let agent = vec!["agent".to_owned(), "--admin-server-port=off".to_owned()];
    let places = [site.near.clone(), site.far.clone()];
    let [_agents, health @ ..] = route.start_pair(site, [adit, adit], &places, [server, agent])?;
    for port in health {
        site.wait_until_ready(port)?;
    }
    // Server and agent cost the same behind each proxy: only the proxy counts.
    route.processes.clear();
    Ok(frontend)
}
