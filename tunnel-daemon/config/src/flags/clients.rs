//! Flags of the listeners for clients, which `adit server` and `adit proxy` share.

use std::path::PathBuf;
use std::time::Duration;

use adit_core::grant::ClientRules;

use super::values::{FrontendSpec, Place};
use crate::address::BindAddress;
use crate::error::ConfigError;
use crate::plan::{ClientsPlan, ConnectPlan, FrontendListen, FrontendPlan, TlsFiles};
use crate::tls_policy::TlsPolicy;

/// Whether clear text on loopback has to be asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LoopbackClients {
    /// It has, by --insecure-plaintext-frontend.
    Named,
    /// It goes without saying: the process stands beside its clients.
    Understood,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Frontends")]
pub(super) struct ClientFlags {
    /// Certificate of TCP frontends
    #[arg(long, value_name = "FILE", requires = "server_key")]
    server_cert: Option<PathBuf>,
    /// Key of --server-cert
    #[arg(long, value_name = "FILE", requires = "server_cert")]
    server_key: Option<PathBuf>,
    /// CA of client certificates on TCP frontends, which are required
    #[arg(long, value_name = "FILE", requires = "server_cert")]
    server_ca_cert: Option<PathBuf>,
    /// TCP frontends in clear text, for anyone who can connect
    #[arg(long, conflicts_with = "server_cert")]
    insecure_plaintext_frontend: bool,
    /// Users of socks5 and http-proxy frontends in clear text on TCP, lines NAME:PASSWORD; without it these listen on loopback
    #[arg(long, value_name = "FILE", requires = "insecure_plaintext_frontend")]
    frontend_users: Option<PathBuf>,
    /// A target that clients may ask for: address, network, name, *.SUFFIX or *, with a port if you like; with cn=, dns= or uri=
    /// before it only for clients whose certificate has these names, such as cn=prometheus,10.0.0.0/8:9100, with peer= for dials
    /// of another server; or all, or none;
    /// repeatable [default: all]
    #[arg(long = "client-allow-target", value_name = "RULE")]
    client_allow_targets: Vec<String>,
    /// Remove a stale socket file before listening
    #[arg(long, value_name = "BOOL", default_value_t = true, num_args = 0..=1, default_missing_value = "true", action = clap::ArgAction::Set)]
    delete_existing_uds_file: bool,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "TLS")]
pub(super) struct TlsFlags {
    /// Lowest TLS version: VersionTLS12 or VersionTLS13
    #[arg(long, value_name = "VERSION", default_value = "VersionTLS12", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    tls_min_version: String,
    /// TLS 1.2 cipher suites, comma list of Go names; repeatable [default: all that are safe]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = clap::builder::NonEmptyStringValueParser::new())]
    cipher_suites: Vec<String>,
}

impl TlsFlags {
    pub(super) fn policy(&self, warnings: &mut Vec<String>) -> Result<TlsPolicy, ConfigError> {
        TlsPolicy::parse(&self.tls_min_version, &self.cipher_suites, warnings)
    }
}

impl ClientFlags {
    /// The plan of these frontends; `keepalive`: time between HTTP/2 pings.
    pub(super) fn plan(
        &self,
        frontends: &[FrontendSpec],
        loopback: LoopbackClients,
        keepalive: Duration,
        warnings: &mut Vec<String>,
    ) -> Result<ClientsPlan, ConfigError> {
        Ok(ClientsPlan {
            frontends: self.listeners(frontends, loopback, warnings)?,
            only_loopback: false,
            users: self.frontend_users.clone(),
            rules: ClientRules::parse(&self.client_allow_targets)
                .map_err(|error| ConfigError::new(format!("--client-allow-target {error}")))?,
            keepalive,
            connect: ConnectPlan::default(),
        })
    }

    fn listeners(
        &self,
        frontends: &[FrontendSpec],
        loopback: LoopbackClients,
        warnings: &mut Vec<String>,
    ) -> Result<Vec<FrontendPlan>, ConfigError> {
        let plan = |spec: &FrontendSpec| {
            let listen = match &spec.place {
                Place::Unix(path) => FrontendListen::Unix {
                    path: path.clone(),
                    delete_existing: self.delete_existing_uds_file,
                },
                Place::Tcp(bind) => self.tcp(bind, loopback, warnings)?,
            };
            Ok(FrontendPlan {
                dialect: spec.dialect,
                listen,
            })
        };
        let plans = frontends
            .iter()
            .map(plan)
            .collect::<Result<Vec<_>, ConfigError>>()?;
        if self.server_cert.is_some()
            && !frontends
                .iter()
                .any(|spec| matches!(spec.place, Place::Tcp(_)))
        {
            warnings.push(
                "--server-cert, --server-key, --server-ca-cert are unused: no frontend is on TCP"
                    .to_owned(),
            );
        }
        Ok(plans)
    }

    fn tcp(
        &self,
        bind: &BindAddress,
        loopback: LoopbackClients,
        warnings: &mut Vec<String>,
    ) -> Result<FrontendListen, ConfigError> {
        let bind = bind.clone();
        let is_local = loopback == LoopbackClients::Understood && bind.is_loopback();
        if is_local && self.server_cert.is_none() {
            return Ok(FrontendListen::Tcp { bind, tls: None });
        }
        if self.insecure_plaintext_frontend {
            if !bind.is_loopback() {
                warnings.push(format!(
                    "the frontend on {bind} serves anyone who can connect, in clear text"
                ));
            }
            return Ok(FrontendListen::Tcp { bind, tls: None });
        }
        match (&self.server_cert, &self.server_key, &self.server_ca_cert) {
            (Some(cert), Some(key), Some(ca)) => {
                let tls = TlsFiles {
                    cert: cert.clone(),
                    key: key.clone(),
                    client_ca: Some(ca.clone()),
                };
                Ok(FrontendListen::Tcp {
                    bind,
                    tls: Some(tls),
                })
            }
            _ => Err(ConfigError::new(format!(
                "the frontend on {bind} needs client certificates: give --server-cert, --server-key and \
                 --server-ca-cert, or --insecure-plaintext-frontend to serve anyone in clear text"
            ))),
        }
    }
}
