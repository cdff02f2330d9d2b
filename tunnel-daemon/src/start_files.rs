//! Waits at start for files that may block. The loads after it then find files that answer, and a signal ends the wait.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use adit_config::plan::{
    AgentPlan, AgentTls, ClientsPlan, FrontendListen, PeerAddress, ProxyPlan, ServerPlan, TlsFiles,
};

/// Files of the resolver.
const RESOLVER: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];

/// Waits until each file can be read, or not: its load says why. A file that takes long is named in the log. To be used within
/// [`tokio::select`] with a signal.
pub(super) async fn wait_for(paths: &[PathBuf]) {
    for path in paths {
        let (name, path) = (path.display().to_string(), path.clone());
        let read = move || {
            // Some mounts answer a call to open and no call to read.
            let read = adit_host::files::open(&path).and_then(|mut file| file.read(&mut [0]));
            drop(read);
        };
        let _stopping = adit_host::files::read_once(&name, read).await;
    }
}

/// Files that the start of a server reads. The Kubernetes API waits for its own.
pub(super) fn of_server(plan: &ServerPlan) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    if let Some(port) = &plan.agents.port {
        of_tls(&port.tls, &mut paths);
    }
    of_clients(&plan.clients, &mut paths);
    paths.extend(plan.agents.crl.clone());
    paths.extend(plan.agents.deny.clone());
    let mut has_names = !plan.destinations.allowed.is_empty();
    if let Some(peers) = &plan.peers {
        of_tls(&peers.tls, &mut paths);
        paths.extend(peers.crl.clone());
        let mut peers = peers.peers.iter();
        has_names |= peers.any(|peer| matches!(peer, PeerAddress::Dns { .. }));
    }
    let redirect = plan.transparent.redirect.as_ref();
    paths.extend(redirect.and_then(|redirect| redirect.file.clone()));
    if has_names {
        paths.extend(RESOLVER.map(PathBuf::from));
    }
    paths
}

fn of_tls(files: &TlsFiles, paths: &mut Vec<PathBuf>) {
    paths.extend([files.cert.clone(), files.key.clone()]);
    paths.extend(files.client_ca.clone());
}

fn of_clients(plan: &ClientsPlan, paths: &mut Vec<PathBuf>) {
    for frontend in &plan.frontends {
        if let FrontendListen::Tcp {
            tls: Some(files), ..
        } = &frontend.listen
        {
            of_tls(files, paths);
        }
    }
    paths.extend(plan.users.clone());
}

fn of_servers(tls: &AgentTls, paths: &mut Vec<PathBuf>) {
    paths.push(tls.ca_cert.clone());
    if let Some(identity) = &tls.identity {
        paths.extend([identity.cert.clone(), identity.key.clone()]);
    }
}

/// Files that the start of a proxy reads.
pub(super) fn of_proxy(plan: &ProxyPlan) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    of_servers(&plan.server_tls, &mut paths);
    of_clients(&plan.clients, &mut paths);
    paths.extend(RESOLVER.map(PathBuf::from));
    paths
}

/// Files that the start of an agent reads.
pub(super) fn of_agent(plan: &AgentPlan) -> Vec<PathBuf> {
    let mut paths = Vec::new();
    of_servers(&plan.tls, &mut paths);
    let redirect = plan.redirect.as_ref();
    paths.extend(redirect.and_then(|redirect| redirect.file.clone()));
    paths.extend(RESOLVER.map(|path| Path::new(path).to_owned()));
    paths
}
