//! HAProxy, nginx and Envoy before agent ports, with the configurations of docs/guides/routers.md. Only addresses are replaced.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::ports;
use super::process::Process;
use super::skip::{finds_program, skip};

const PAGE: &str = include_str!("../../../../docs/guides/routers.md");
/// What the page's lines with server names contain, for which it has other lines with ALPN names.
const NAMED: [&str; 3] = ["a.example", "b.example", "$ssl_preread_server_name"];
/// Addresses on the page: of the router, and of what is behind it.
const ROUTER: &str = "443";
const BEHIND: [&str; 3] = ["10.0.0.1:8091", "10.0.0.2:8091", "10.0.1.1:8091"];

#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    HaProxy,
    Nginx,
    Envoy,
}

impl Kind {
    fn program(self) -> &'static str {
        match self {
            Self::HaProxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Envoy => "envoy",
        }
    }

    /// Of the page's blocks.
    fn language(self) -> &'static str {
        match self {
            Self::HaProxy => "haproxy",
            Self::Nginx => "nginx",
            Self::Envoy => "yaml",
        }
    }

    /// Whether it is installed; else `test` is reported as skipped.
    pub(crate) fn is_here(self, test: &str) -> bool {
        if !finds_program(self.program(), test) {
            return false;
        }
        let lacks = matches!(self, Self::Nginx) && stream_module().is_none();
        if lacks {
            skip(test, "nginx has no stream module");
        }
        !lacks
    }

    /// What the page's configuration needs besides to run here: in the foreground as one process, which a kill ends whole.
    fn complete(self, config: &str, dir: &Path) -> String {
        if !matches!(self, Self::Nginx) {
            return config.to_owned();
        }
        let module = stream_module().expect("it was looked for");
        let pid = dir.join("nginx.pid").display().to_string();
        format!(
            "{module}\ndaemon off;\nmaster_process off;\npid {pid};\nerror_log stderr;\nevents {{}}\n{config}"
        )
    }

    /// The command that runs this configuration.
    fn command(self, file: &Path) -> Command {
        let mut command = Command::new(self.program());
        match self {
            Self::HaProxy => command.arg("-db").arg("-f").arg(file),
            Self::Nginx => command.args(["-e", "stderr", "-c"]).arg(file),
            Self::Envoy => command
                .args(["--disable-hot-restart", "--concurrency", "2"])
                .args(["--log-level", "warning", "-c"])
                .arg(file),
        };
        command
    }
}

/// The line that loads nginx's stream module: empty if it is compiled in. `None` without the module.
fn stream_module() -> Option<String> {
    let said = Command::new("nginx").arg("-V").output().ok()?;
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    let mut flags = said.split_whitespace();
    if flags.clone().any(|flag| flag == "--with-stream") {
        return Some(String::new());
    }
    let folder = flags.find_map(|flag| flag.strip_prefix("--modules-path="))?;
    let module = PathBuf::from(folder).join("ngx_stream_module.so");
    module
        .exists()
        .then(|| format!("load_module {};", module.display()))
}

/// The page's block of this number and language below a heading.
pub(crate) fn block(heading: &str, language: &str, number: usize) -> String {
    let (_, section) = PAGE
        .split_once(&format!("\n## {heading}\n"))
        .unwrap_or_else(|| panic!("the page has no heading {heading}"));
    let section = section.split("\n## ").next().unwrap_or_default();
    let opening = format!("```{language}\n");
    let block = section.split(&opening).nth(number + 1);
    let block = block.and_then(|rest| rest.split_once("```"));
    block.expect("the page has this block").0.to_owned()
}

/// Puts an address of this host in the place of an address, or of all addresses with a port, of the page.
pub(crate) fn placed(config: &str, there: &str, here: SocketAddr) -> String {
    let (host, port) = there.split_once(':').unwrap_or(("0.0.0.0", there));
    let yaml = |host: &str, port: &str| format!("address: {host}, port_value: {port}");
    let (ip, here_port) = (here.ip().to_string(), here.port().to_string());
    let mut changed = config.replace(&yaml(host, port), &yaml(&ip, &here_port));
    if there.contains(':') {
        changed = changed.replace(there, &here.to_string());
    } else {
        changed = changed.replace(&format!("bind :{port}"), &format!("bind {here}"));
        changed = changed.replace(&format!("listen {port};"), &format!("listen {here};"));
    }
    assert!(changed != config, "the page does not contain {there}");
    changed
}

/// The page's configuration by ALPN: that by name, with other lines.
fn by_alpn(kind: Kind) -> String {
    let other = block("By ALPN", kind.language(), 0);
    let mut other = other.lines();
    let lines = block("By name", kind.language(), 0);
    let lines = lines.lines().map(|line| {
        let is_named = NAMED.iter().any(|name| line.contains(name));
        let line = if is_named { other.next() } else { Some(line) };
        format!("{}\n", line.expect("a line for each with a name"))
    });
    lines.collect()
}

/// A router, which may be restarted.
pub(crate) struct Router {
    kind: Kind,
    pub(crate) address: SocketAddr,
    dir: TempDir,
    running: Option<Process>,
}

impl Router {
    /// By server names: A has the first two servers, B the third.
    pub(crate) fn by_name(kind: Kind, servers: [SocketAddr; 3]) -> Self {
        Self::start(kind, &block("By name", kind.language(), 0), servers)
    }

    /// By ALPN: connections that offer `protocol` reach the server, others another address.
    pub(crate) fn by_alpn(
        kind: Kind,
        protocol: &str,
        server: SocketAddr,
        other: SocketAddr,
    ) -> Self {
        let config = by_alpn(kind).replace("konnectivity", protocol);
        Self::start(kind, &config, [server, server, other])
    }

    fn start(kind: Kind, config: &str, behind: [SocketAddr; 3]) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], ports::free()));
        let mut config = placed(config, ROUTER, address);
        for (there, here) in BEHIND.into_iter().zip(behind) {
            config = placed(&config, there, here);
        }
        let mut router = Self {
            kind,
            address,
            dir: TempDir::new().expect("a folder"),
            running: None,
        };
        fs::write(router.file(), kind.complete(&config, router.dir.path())).expect("a file");
        router.run();
        router
    }

    fn file(&self) -> PathBuf {
        self.dir
            .path()
            .join(format!("{}.yaml", self.kind.program()))
    }

    /// Starts it again.
    pub(crate) fn run(&mut self) {
        let command = self.kind.command(&self.file());
        let name = self.kind.program();
        self.running = Some(Process::start_command(name, command, self.dir.path()));
    }

    /// Kills it, and with it all connections.
    pub(crate) fn stop(&mut self) {
        self.running.take().expect("it runs").kill();
    }
}

/// Starts Envoy with a configuration.
pub(crate) fn envoy(name: &str, config: &str, dir: &Path) -> Process {
    let file = dir.join(format!("{name}.yaml"));
    fs::write(&file, config).expect("a file");
    Process::start_command(name, Kind::Envoy.command(&file), dir)
}
