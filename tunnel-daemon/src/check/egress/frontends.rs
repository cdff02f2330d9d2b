//! The routes of a file beside the flags of a server: the same address, the same protocol, and certificates that fit. The
//! handshake is between two ends of one socket pair, so that the server need not run.

use std::net::IpAddr;
use std::path::Path;

use tokio::net::UnixStream;

use super::Tried;
use super::judge::{Protocol, Route, TlsRoute};
use crate::check::line::{degraded, missing, ok};
use crate::listeners::server_tls;
use crate::status::model::Capability;
use adit_config::address::BindHost;
use adit_config::limits::TLS_HANDSHAKE_TIMEOUT;
use adit_config::plan::{Dialect, FrontendListen, FrontendPlan, ServerPlan, TlsFiles};
use adit_tls::cause::TlsCause;
use adit_tls::handshake::{accept_tls, connect_tls};
use adit_tls::reload::{Reloadable, ReloadableClientTls};
use adit_tls::stream::{PeerAddr, Socket};
use adit_tls::tls::{Alpn, ServerTls, server_name};

/// Whether a frontend of the server fits the route; `None` for a route without a server.
pub(super) async fn fits(tried: &Tried, server: &ServerPlan) -> Option<Capability> {
    let Tried { names, route, .. } = tried;
    let frontends = &server.clients.frontends;
    let (shown, protocol, found) = match route {
        Route::Direct => return None,
        Route::Unix { protocol, path } => {
            let found = frontends.iter().find(|frontend| listens_at(frontend, path));
            (path.clone(), *protocol, found)
        }
        Route::Tls(route) => {
            let found = frontends.iter().find(|frontend| takes(frontend, route));
            (route.to_string(), Protocol::HttpConnect, found)
        }
    };
    let Some(frontend) = found else {
        return Some(degraded(
            format!("{names}: no frontend of this command line listens at {shown}"),
            "correct the file or the flags; in kube-apiserver's container the folder may have another path",
        ));
    };
    let (dialect, wanted) = (frontend.dialect.name(), protocol.name());
    let is_same = match protocol {
        Protocol::Grpc => frontend.dialect == Dialect::Grpc,
        // An HTTP proxy takes CONNECT as well.
        Protocol::HttpConnect => {
            matches!(frontend.dialect, Dialect::HttpConnect | Dialect::HttpProxy)
        }
    };
    if !is_same {
        return Some(missing(
            format!(
                "{names}: the frontend at {shown} speaks {dialect}, and proxyProtocol is {wanted}"
            ),
            "write grpc for GRPC, http-connect for HTTPConnect (--frontend, --mode)",
        ));
    }
    Some(match (&frontend.listen, route) {
        (FrontendListen::Tcp { tls: None, .. }, _) => missing(
            format!(
                "{names}: the frontend at {shown} has no TLS, which kube-apiserver always uses on TCP"
            ),
            "give --server-cert, --server-key and --server-ca-cert, or use transport.uds",
        ),
        (
            FrontendListen::Tcp {
                tls: Some(files), ..
            },
            Route::Tls(route),
        ) => handshake(tried, route, files, server).await,
        _ => ok(format!(
            "{names}: the frontend at {shown} speaks {dialect}, as {wanted} needs"
        )),
    })
}

fn listens_at(frontend: &FrontendPlan, path: &str) -> bool {
    matches!(&frontend.listen, FrontendListen::Unix { path: own, .. } if own == Path::new(path))
}

/// A name may be any address of this host, so its port decides.
fn takes(frontend: &FrontendPlan, route: &TlsRoute) -> bool {
    let FrontendListen::Tcp { bind, .. } = &frontend.listen else {
        return false;
    };
    let is_host = match (&bind.host, route.host.parse::<IpAddr>()) {
        (BindHost::Ip(own), Ok(ip)) => own.is_unspecified() || *own == ip,
        _ => true,
    };
    bind.port == route.port && is_host
}

async fn handshake(
    tried: &Tried,
    route: &TlsRoute,
    files: &TlsFiles,
    server: &ServerPlan,
) -> Capability {
    let names = &tried.names;
    let Some(tls) = &tried.tls else {
        return tried.without_files();
    };
    match between(route, tls, server_tls(files, &server.tls, Alpn::http11())).await {
        Ok(true) => ok(format!(
            "{names}: kube-apiserver and the frontend at {route} accept each other's certificates"
        )),
        Ok(false) => degraded(
            format!(
                "{names}: the certificate of the frontend at {route} is a CA, which kube-apiserver takes; nothing more is compared"
            ),
            "issue one with CA:FALSE",
        ),
        Err((text, remedy)) => missing(format!("{names}: {route}: {text}"), remedy),
    }
}

/// Whether both accept each other; `false`: the server's certificate is a CA, which ends the comparison here alone.
///
/// # Errors
/// Which end refuses the other, why, and the remedy.
async fn between(
    route: &TlsRoute,
    client: &ReloadableClientTls,
    server: ServerTls,
) -> Result<bool, (String, &'static str)> {
    const CLIENT: &str =
        "correct caBundle, url and tlsServerName of the file, or the server's --server-cert";
    const SERVER: &str = "correct clientCert of the file, or the server's --server-ca-cert";
    let name = server_name(route.server_name());
    let name = name.map_err(|error| (error.to_string(), CLIENT))?;
    let server = Reloadable::load(server);
    let server = server.map_err(|error| (error.to_string(), "correct the file"))?;
    let pair = UnixStream::pair();
    let (near, far) = pair.map_err(|error| (error.to_string(), "raise the limit of open files"))?;
    let limit = TLS_HANDSHAKE_TIMEOUT;
    let (connected, accepted) = tokio::join!(
        connect_tls(
            Socket::Unix(near),
            PeerAddr::Unix,
            client,
            name,
            None,
            limit
        ),
        accept_tls(Socket::Unix(far), PeerAddr::Unix, &server, limit),
    );
    // An alert of one end is the other's verdict in fewer words.
    match (connected, accepted) {
        (Ok(_), Ok(_)) => Ok(true),
        // Refused here alone: kube-apiserver takes a certificate that is a CA.
        (Err(error), _) if matches!(error.cause, TlsCause::OfCa) => Ok(false),
        (Err(error), Ok(_)) => Err((format!("kube-apiserver's side: {}", error.cause), CLIENT)),
        (Err(error), _) if error.cause.is_refusal() => {
            Err((format!("kube-apiserver's side: {}", error.cause), CLIENT))
        }
        (_, Err(failed)) => Err((format!("the server's side: {}", failed.error.cause), SERVER)),
    }
}
