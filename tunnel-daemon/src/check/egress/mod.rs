//! `adit check --egress-config`: the file of kube-apiserver's `--egress-selector-config-file`. What kube-apiserver would do with
//! it, whether it fits a server's flags, and whether a server answers where it leads to.
//!
//! Nothing is dialled through a server: each attempt ends at its frontend.

mod answer;
mod attempt;
mod file;
mod finding;
mod frontends;
mod judge;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use tokio::runtime::Builder;

pub(super) use self::attempt::{Failure, tcp};
use self::finding::Finding;
use self::judge::{Route, judge};
use super::certificates;
use super::line::{missing, ok};
use crate::status::model::Capability;
use adit_config::plan::{AgentTls, Identity, ServerPlan};
use adit_host::blocking::start_runtime;
use adit_tls::reload::ReloadableClientTls;

const NAME: &str = "egress";

/// Bundles of public CAs: the first that exists is what a program in Go trusts without a CA of its own.
const PUBLIC_CAS: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/ssl/cert.pem",
];

/// A route, with what is needed to try it.
struct Tried {
    /// Names of its selections.
    names: String,
    route: Route,
    /// Of a route with TLS: its files, if they can be used.
    tls: Option<Arc<ReloadableClientTls>>,
}

/// Lines about the file at `path`, compared with the flags of `server` if there are any, and tried if `connect`.
///
/// # Errors
/// The runtime or the resolver could not be created.
pub(super) fn of_file(
    path: &Path,
    server: Option<&ServerPlan>,
    connect: bool,
    now: SystemTime,
) -> anyhow::Result<Vec<Capability>> {
    let judged = judge(file::read(path));
    let mut lines: Vec<Capability> = judged.findings.into_iter().map(Finding::line).collect();
    let mut routes = Vec::new();
    for (names, route) in judged.routes {
        let (of_files, tls) = match &route {
            Route::Tls(route) => certificates::of_kube_apiserver(&client_files(&route.tls), now),
            Route::Direct | Route::Unix { .. } => (Vec::new(), None),
        };
        lines.extend(of_files);
        routes.push(Tried { names, route, tls });
    }
    let runtime = start_runtime(&mut Builder::new_current_thread(), 0, |_error| ())?;
    runtime.block_on(async {
        for tried in &routes {
            if let Some(server) = server {
                lines.extend(frontends::fits(tried, server).await);
            }
            if connect {
                lines.push(attempt::line(tried).await?);
            }
        }
        Ok::<_, anyhow::Error>(())
    })?;
    if lines.is_empty() {
        lines.push(ok(format!("{}: kube-apiserver takes it", path.display())));
    }
    Ok(lines.into_iter().map(|line| line.named(NAME)).collect())
}

/// The files towards a server. Without a CA those of this host take the place of those of kube-apiserver's image.
fn client_files(tls: &file::TlsConfig) -> AgentTls {
    let public = || PUBLIC_CAS.iter().find(|path| Path::new(path).exists());
    let ca_cert = match tls.ca_bundle.as_str() {
        "" => PathBuf::from(public().unwrap_or(&PUBLIC_CAS[0])),
        path => PathBuf::from(path),
    };
    AgentTls {
        ca_cert,
        identity: Some(Identity {
            cert: PathBuf::from(&tls.client_cert),
            key: PathBuf::from(&tls.client_key),
        }),
        alpn: Vec::new(),
    }
}

impl Tried {
    /// A line about a route whose files cannot be used.
    fn without_files(&self) -> Capability {
        let text = format!(
            "{}: not tried: its certificates cannot be used here; kube-apiserver does not start without a certificate and key \
             that it can read",
            self.names
        );
        missing(text, "correct the files of the lines above")
    }
}
