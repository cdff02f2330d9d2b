//! Maps validated `proxy-server` options to Adit's plan: one frontend, and upstream's timings.

use std::path::PathBuf;
use std::time::Duration;

use adit_core::grant::{ClientRules, Grants};
use adit_core::ids::ServerId;
use adit_kube::reviewer::Rate;

use super::gotype::GoDuration;
use super::server::ServerOptions;
use super::server_check::Checked;
use super::shared::{bind, file};
use crate::error::{ConfigError, bail};
use crate::flags::compat::ServerExtras;
use crate::limits;
use crate::plan::{
    AdminSocketPlan, AgentListenerPlan, AgentPort, AgentProof, ClientsPlan, ConnectPlan,
    DestinationsPlan, DialPlan, Dialect, Drain, FrontendListen, FrontendPlan, IsolationPlan,
    PublishPlan, ServerPlan, ServerSettings, ShutdownPlan, TlsFiles, TokenPlan, TransparentPlan,
};

/// Maps options that passed upstream's validation.
pub(super) fn map(
    options: &ServerOptions,
    checked: Checked,
    extras: ServerExtras,
    warnings: &mut Vec<String>,
) -> Result<ServerPlan, ConfigError> {
    let leases = options
        .enable_lease_controller
        .then(|| {
            PublishPlan::of_flags(
                &options.shared.lease_namespace,
                &options.lease_label,
                &options.shared.kubeconfig,
                &options.server_id,
            )
        })
        .transpose()?;
    let mut settings = ServerSettings {
        server_id: ServerId::new(&options.server_id),
        server_count: options.server_count,
        leases,
        clients: ClientsPlan {
            frontends: vec![frontend(options, checked.dialect)?],
            only_loopback: false,
            users: None,
            rules: ClientRules::default(),
            keepalive: server_keepalive(options.frontend_keepalive_time),
            connect: ConnectPlan::default(),
        },
        agents: agent_listener(options, warnings)?,
        peers: None,
        tls: checked.tls,
        health: Some(bind(
            "health",
            &options.health_bind_address,
            options.health_port,
        )?),
        admin_socket: AdminSocketPlan::Off,
        admin: Some(bind(
            "admin",
            &options.shared.admin_bind_address,
            options.admin_port,
        )?),
        transparent: TransparentPlan::default(),
        strategies: checked.strategies,
        destinations: DestinationsPlan::default(),
        dial: DialPlan {
            timeout: Some(options.backend_dial_timeout.to_std())
                .filter(|timeout| !timeout.is_zero()),
            ..DialPlan::default()
        },
        isolation: IsolationPlan::default(),
        account: options.shared.account()?,
        shutdown: ShutdownPlan {
            drain: Drain::For(options.graceful_shutdown_timeout.to_std()),
            second_signal_exit_code: 1,
        },
        log: options.shared.klog.plan("proxy-server", warnings),
        access_log_limit: limits::ACCESS_LOG_LIMIT,
        metrics_agents: 0,
        compat: true,
    };
    extras.put(&mut settings)?;
    settings.check()
}

fn frontend(options: &ServerOptions, dialect: Dialect) -> Result<FrontendPlan, ConfigError> {
    let listen = if options.uds_name.is_empty() {
        if options.server_cert.is_empty() {
            bail!("a frontend on TCP needs --server-cert and --server-key beside --server-ca-cert");
        }
        FrontendListen::Tcp {
            bind: bind("server", &options.server_bind_address, options.server_port)?,
            tls: Some(tls_files(
                &options.server_cert,
                &options.server_key,
                &options.server_ca_cert,
            )),
        }
    } else {
        FrontendListen::Unix {
            path: PathBuf::from(&options.uds_name),
            delete_existing: options.delete_existing_uds_file,
        }
    };
    Ok(FrontendPlan { dialect, listen })
}

fn agent_listener(
    options: &ServerOptions,
    warnings: &mut Vec<String>,
) -> Result<AgentListenerPlan, ConfigError> {
    if options.cluster_cert.is_empty() {
        bail!("the agent listener needs a certificate: give --cluster-cert and --cluster-key");
    }
    let tokens = TokenPlan::of_flags(
        &options.agent_namespace,
        &options.agent_service_account,
        &options.authentication_audience,
        &options.shared.kubeconfig,
        Rate {
            per_second: options.kubeconfig_qps,
            burst: options.kubeconfig_burst,
        },
        AgentProof::Either,
    )?;
    if !options.agent_crl.is_empty() && options.cluster_ca_cert.is_empty() {
        bail!(
            "--agent-crl is about certificates of agents, and none is asked for: give --cluster-ca-cert"
        );
    }
    let authenticated = !options.cluster_ca_cert.is_empty() || tokens.is_some();
    let insecure = options.insecure_allow_unauthenticated_agents;
    if authenticated && insecure {
        warnings.push(
            "--insecure-allow-unauthenticated-agents has no effect: agents are authenticated"
                .to_owned(),
        );
    }
    Ok(AgentListenerPlan {
        balancers: Vec::new(),
        port: Some(AgentPort {
            bind: bind("agent", &options.agent_bind_address, options.agent_port)?,
            tls: tls_files(
                &options.cluster_cert,
                &options.cluster_key,
                &options.cluster_ca_cert,
            ),
        }),
        tokens,
        insecure_unauthenticated: insecure && !authenticated,
        keepalive: server_keepalive(options.keepalive_time),
        grants: Grants::parse(&options.agent_grants)
            .map_err(|error| ConfigError::new(format!("--agent-grant {error}")))?,
        zone: (!options.zone.is_empty()).then(|| options.zone.clone().into_boxed_str()),
        crl: file(&options.agent_crl),
        deny: file(&options.agent_deny),
        links_per_agent_max: limits::LINKS_PER_AGENT,
        data_path: options
            .shared
            .data_path("--lanes-per-link", options.lanes)?,
    })
}

fn tls_files(cert: &str, key: &str, client_ca: &str) -> TlsFiles {
    TlsFiles {
        cert: PathBuf::from(cert),
        key: PathBuf::from(key),
        client_ca: file(client_ca),
    }
}

/// gRPC-Go treats a time that is not positive as unset.
fn server_keepalive(time: GoDuration) -> Duration {
    match time.0 {
        ..=0 => limits::KEEPALIVE_TIME_UNSET,
        _ => time.to_std(),
    }
}
