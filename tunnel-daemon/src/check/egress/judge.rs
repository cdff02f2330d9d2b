//! What kube-apiserver makes of a decoded file: its own checks of a start, and what it never checks but cannot use.

use std::fmt;
use std::path::Path;

use super::file::{Decoded, Selection, Tcp, TlsConfig, Transport};
use super::finding::{Effect, Finding};
use adit_config::limits::UNIX_SOCKET_PATH_BYTES_MAX;

/// Names of selections, which kube-apiserver compares without case.
const NAMES: [&str; 3] = ["cluster", "controlplane", "etcd"];
/// The values of proxyProtocol, with case.
const PROTOCOLS: [&str; 3] = ["GRPC", "HTTPConnect", "Direct"];

/// The protocol towards a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Protocol {
    Grpc,
    HttpConnect,
}

impl Protocol {
    /// The value of proxyProtocol.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Grpc => "GRPC",
            Self::HttpConnect => "HTTPConnect",
        }
    }
}

/// How kube-apiserver connects.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Route {
    /// Without a server.
    Direct,
    /// Through the server at a unix socket.
    Unix { protocol: Protocol, path: String },
    /// Through the server at a TCP address: HTTP CONNECT inside TLS.
    Tls(TlsRoute),
}

/// A TCP address, and the files towards it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct TlsRoute {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: TlsConfig,
}

impl TlsRoute {
    /// The name that the server's certificate must have.
    pub(super) fn server_name(&self) -> &str {
        match self.tls.server_name.as_str() {
            "" => &self.host,
            name => name,
        }
    }
}

impl fmt::Display for TlsRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port, .. } = self;
        match host.contains(':') {
            true => write!(f, "[{host}]:{port}"),
            false => write!(f, "{host}:{port}"),
        }
    }
}

/// A judged file.
#[derive(Default, Debug)]
pub(super) struct Judged {
    /// The routes that kube-apiserver can use, each with the names of its selections.
    pub(super) routes: Vec<(String, Route)>,
    pub(super) findings: Vec<Finding>,
}

/// Judges what the file says.
pub(super) fn judge(decoded: Decoded) -> Judged {
    let Decoded {
        selections,
        findings,
    } = decoded;
    let is_decoded = !findings.iter().any(|found| found.effect == Effect::NoStart);
    let mut judge = Judge { findings };
    let mut routes: Vec<(String, Route)> = Vec::new();
    let mut names: Vec<String> = Vec::new();
    for selection in &selections {
        let name = judge.name(selection, &mut names);
        let route = judge.route(selection);
        let (Some(name), Some(route)) = (name, route) else {
            continue;
        };
        judge.use_of(selection, &name, &route);
        match routes.iter_mut().find(|(_, known)| *known == route) {
            Some((names, _)) => *names = format!("{names}, {name}"),
            None => routes.push((name, route)),
        }
    }
    if is_decoded && !names.iter().any(|name| name == "cluster") {
        judge.found(
            Effect::Works,
            "no selection is named cluster: kube-apiserver connects to nodes, pods, Services and webhooks directly",
            "add a selection cluster, if they are behind the tunnel",
        );
    }
    Judged {
        routes,
        findings: judge.findings,
    }
}

struct Judge {
    findings: Vec<Finding>,
}

impl Judge {
    fn found(&mut self, effect: Effect, what: impl Into<String>, remedy: impl Into<String>) {
        self.findings.push(Finding::new(effect, what, remedy));
    }

    /// The selection's name in lower case; `None` if it is unknown or was there before.
    fn name(&mut self, selection: &Selection, before: &mut Vec<String>) -> Option<String> {
        let Selection { at, name, .. } = selection;
        let name = name.to_ascii_lowercase();
        if before.contains(&name) {
            let what = format!("{at}: {name} is selected twice");
            self.found(
                Effect::NoStart,
                what,
                "remove one; master and controlplane are one, too",
            );
            return None;
        }
        before.push(name.clone());
        if NAMES.contains(&name.as_str()) {
            return Some(name);
        }
        let (what, remedy) = match name.as_str() {
            "" => (
                format!("{at} has no name"),
                format!("write name: {}", NAMES.join(", or ")),
            ),
            "master" => (
                format!("{at}: the name master is known in lower case only"),
                "write controlplane".to_owned(),
            ),
            _ => (
                format!("{at}: no selection has this name"),
                format!("the names are {}", NAMES.join(", ")),
            ),
        };
        self.found(Effect::NoStart, what, remedy);
        None
    }

    /// What a usable selection means for its kind of targets.
    fn use_of(&mut self, selection: &Selection, name: &str, route: &Route) {
        let at = &selection.at;
        match (name, route) {
            ("cluster", Route::Direct) => self.found(
                Effect::Works,
                format!("{at}: Direct: kube-apiserver connects to nodes, pods, Services and webhooks without a tunnel"),
                "write GRPC or HTTPConnect and a transport, if they are behind the tunnel",
            ),
            ("etcd", Route::Unix { .. } | Route::Tls(_)) => self.found(
                Effect::Works,
                format!(
                    "{at}: kube-apiserver reaches etcd through an agent only, so that it is not ready before one is connected"
                ),
                "remove the selection, unless etcd is in the network of the agents",
            ),
            _ => (),
        }
    }

    fn route(&mut self, selection: &Selection) -> Option<Route> {
        let Selection {
            at,
            protocol,
            transport,
            ..
        } = selection;
        match (protocol.as_str(), transport) {
            ("Direct", None) => Some(Route::Direct),
            ("Direct", Some(_)) => {
                let what = format!("{at}: proxyProtocol is Direct, and there is a transport");
                self.found(
                    Effect::NoStart,
                    what,
                    "remove the transport, or write GRPC or HTTPConnect",
                );
                None
            }
            ("GRPC" | "HTTPConnect", None) => {
                let what = format!("{at}: proxyProtocol is {protocol}, and there is no transport");
                self.found(
                    Effect::NoStart,
                    what,
                    "add transport.uds.udsName with the server's socket",
                );
                None
            }
            ("GRPC", Some(transport)) => self.grpc(at, transport),
            ("HTTPConnect", Some(transport)) => self.http_connect(at, transport),
            _ => {
                self.unknown_protocol(at, protocol);
                None
            }
        }
    }

    fn unknown_protocol(&mut self, at: &str, protocol: &str) {
        let plain = |text: &str| text.replace(['-', '_'], "").to_ascii_lowercase();
        let meant = PROTOCOLS
            .iter()
            .find(|known| plain(known) == plain(protocol));
        let remedy = match meant {
            Some(known) => format!("write {known}: upper and lower case count"),
            None => format!("write one of {}", PROTOCOLS.join(", ")),
        };
        let what = match protocol {
            "" => format!("{at} has no proxyProtocol"),
            _ => format!("{at}: proxyProtocol {protocol:?} is unknown"),
        };
        self.found(Effect::NoStart, what, remedy);
    }

    fn grpc(&mut self, at: &str, transport: &Transport) -> Option<Route> {
        let Some(path) = &transport.uds else {
            self.found(
                Effect::NoStart,
                format!("{at}: GRPC needs transport.uds, because kube-apiserver speaks gRPC on unix sockets only"),
                "add transport.uds.udsName, or write HTTPConnect for a TCP address",
            );
            return None;
        };
        if transport.tcp.is_some() {
            let what = format!("{at}: kube-apiserver ignores transport.tcp with GRPC");
            self.found(Effect::Works, what, "remove transport.tcp");
        }
        self.unix(at, Protocol::Grpc, path)
    }

    fn http_connect(&mut self, at: &str, transport: &Transport) -> Option<Route> {
        match (&transport.tcp, &transport.uds) {
            (None, Some(path)) => self.unix(at, Protocol::HttpConnect, path),
            (Some(tcp), None) => self.tcp(at, tcp),
            (tcp, _) => {
                let which = if tcp.is_some() { "both" } else { "none" };
                let what = format!(
                    "{at}: HTTPConnect needs either transport.tcp or transport.uds, and there are {which}"
                );
                self.found(
                    Effect::NoStart,
                    what,
                    "leave the one where the server listens",
                );
                None
            }
        }
    }

    fn unix(&mut self, at: &str, protocol: Protocol, path: &str) -> Option<Route> {
        if path.is_empty() {
            let what = format!("{at}: transport.uds has no udsName");
            self.found(
                Effect::NoStart,
                what,
                "write the path of the server's socket",
            );
            return None;
        }
        if let Some((scheme @ "unix", rest)) = path.split_once(':') {
            let what = format!(
                "{at}: udsName {path:?} begins with {scheme}:, and would be a file of that name"
            );
            let bare = format!("/{}", rest.trim_start_matches('/'));
            self.found(Effect::DialsFail, what, format!("write {bare}"));
            return None;
        }
        if path.len() > UNIX_SOCKET_PATH_BYTES_MAX {
            let (bytes, max) = (path.len(), UNIX_SOCKET_PATH_BYTES_MAX);
            let what = format!(
                "{at}: udsName {path:?} has {bytes} bytes, and a socket's path at most {max}"
            );
            self.found(
                Effect::DialsFail,
                what,
                "let the server listen at a shorter path",
            );
            return None;
        }
        if !path.starts_with('@') {
            self.relative(at, "udsName", path);
        }
        Some(Route::Unix {
            protocol,
            path: path.to_owned(),
        })
    }

    fn relative(&mut self, at: &str, field: &str, path: &str) {
        if !path.starts_with('/') {
            let what =
                format!("{at}: {field} {path:?} is relative to kube-apiserver's working directory");
            self.found(Effect::Works, what, "write the whole path");
        }
    }

    fn tcp(&mut self, at: &str, tcp: &Tcp) -> Option<Route> {
        let Tcp { url, tls } = tcp;
        let Some(rest) = url.strip_prefix("https://") else {
            self.not_https(at, url, tls.is_some());
            return None;
        };
        let files = match tls {
            Some(tls) => self.files(at, tls),
            None => {
                let what = format!("{at}: {url} needs transport.tcp.tlsConfig");
                self.found(
                    Effect::NoStart,
                    what,
                    "add caBundle, clientCert and clientKey",
                );
                None
            }
        };
        let (host, port) = self.address(at, url, rest)?;
        Some(Route::Tls(TlsRoute {
            host,
            port,
            tls: files?.clone(),
        }))
    }

    fn not_https(&mut self, at: &str, url: &str, has_tls: bool) {
        const REMEDY: &str = "write https:// and tlsConfig, or use transport.uds";
        match (url.starts_with("http://"), has_tls) {
            (true, true) => {
                let what = format!("{at}: {url} has no TLS, and there is a tlsConfig");
                self.found(Effect::NoStart, what, REMEDY);
            }
            // Its check passes this, and then it reads the absent tlsConfig.
            (true, false) => {
                self.found(Effect::Panic, format!("{at}: {url} is without TLS"), REMEDY);
            }
            (false, _) => {
                let what = format!("{at}: url {url:?} does not begin with https://");
                self.found(
                    Effect::NoStart,
                    what,
                    "write https://HOST:PORT, in lower case",
                );
            }
        }
    }

    /// The files, if kube-apiserver starts with them.
    fn files<'t>(&mut self, at: &str, tls: &'t TlsConfig) -> Option<&'t TlsConfig> {
        let mut are_usable = true;
        for (field, path) in [
            ("caBundle", &tls.ca_bundle),
            ("clientCert", &tls.client_cert),
            ("clientKey", &tls.client_key),
        ] {
            match path.as_str() {
                "" if field == "caBundle" => self.found(
                    Effect::Works,
                    format!(
                        "{at}: without caBundle, kube-apiserver trusts the public CAs of its image"
                    ),
                    "give the CA of the server's certificate",
                ),
                "" => {
                    are_usable = false;
                    let remedy = format!("give {field}: kube-apiserver always shows a certificate");
                    self.found(
                        Effect::NoStart,
                        format!("{at}: tlsConfig has no {field}"),
                        remedy,
                    );
                }
                path if !Path::new(path).exists() => {
                    are_usable = false;
                    self.found(
                        Effect::NoStart,
                        format!("{at}: {field} {path} does not exist here"),
                        "correct the path; if kube-apiserver is a container, run this check where its files have the same paths",
                    );
                }
                path => self.relative(at, field, path),
            }
        }
        are_usable.then_some(tls)
    }

    /// Host and port of a URL, as kube-apiserver's library reads them.
    fn address(&mut self, at: &str, url: &str, rest: &str) -> Option<(String, u16)> {
        let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
        if authority.len() < rest.trim_end_matches('/').len() {
            let what = format!("{at}: kube-apiserver ignores all of {url} behind {authority}");
            self.found(Effect::Works, what, "remove it");
        }
        let address = authority
            .rsplit_once('@')
            .map_or(authority, |(_user, rest)| rest);
        let (host, port) = match address.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port),
            _ => (address, ""),
        };
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let is_valid = match bare {
            Some(bare) => !bare.is_empty(),
            None => !host.contains(|c: char| !c.is_ascii_alphanumeric() && !"-._".contains(c)),
        };
        if !is_valid || !port.bytes().all(|byte| byte.is_ascii_digit()) {
            let what = format!("{at}: {url:?} is no URL");
            self.found(
                Effect::NoStart,
                what,
                "write https://HOST:PORT; an IPv6 address needs brackets",
            );
            return None;
        }
        let number = port.parse::<u16>().ok().filter(|port| *port > 0);
        let Some(number) = number.filter(|_| !host.is_empty()) else {
            let lack = match (host, port) {
                ("", _) => "has no host",
                (_, "") => "has no port, for which there is no default",
                _ => "has a port that is not from 1 to 65535",
            };
            let what = format!("{at}: {url} {lack}");
            self.found(Effect::DialsFail, what, "write https://HOST:PORT");
            return None;
        };
        Some((bare.unwrap_or(host).to_owned(), number))
    }
}
