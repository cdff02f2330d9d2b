//! Validation of `proxy-server` options, in upstream's order and words (conformance item 57).

use adit_core::registry::{Strategies, StrategiesError};
use adit_kube::leases::parse_labels;
use adit_kube::reviewer::Rate;

use super::server::ServerOptions;
use super::server_plan;
use super::shared::{check_channel_size, check_exists, check_pair, check_stat};
use crate::error::{ConfigError, bail};
use crate::flags::compat::ServerExtras;
use crate::limits;
use crate::plan::{AgentProof, Dialect, ServerPlan, TokenPlan};
use crate::tls_policy::TlsPolicy;

/// Values parsed by the validation.
pub(super) struct Checked {
    pub(super) dialect: Dialect,
    pub(super) strategies: Strategies,
    pub(super) tls: TlsPolicy,
}

impl ServerOptions {
    /// Checks the options and makes the plan.
    ///
    /// # Errors
    /// The first error, in upstream's order and words; then errors that upstream reports only later, and options that this
    /// version refuses.
    pub(super) fn plan(
        &self,
        extras: ServerExtras,
        warnings: &mut Vec<String>,
    ) -> Result<ServerPlan, ConfigError> {
        let checked = self.validate(warnings).map_err(|error| {
            ConfigError::new(format!("failed to validate server options with {error}"))
        })?;
        server_plan::map(self, checked, extras, warnings)
    }

    fn validate(&self, warnings: &mut Vec<String>) -> Result<Checked, ConfigError> {
        check_pair("server", &self.server_cert, &self.server_key)?;
        check_exists("server CA cert", &self.server_ca_cert)?;
        check_pair("cluster", &self.cluster_cert, &self.cluster_key)?;
        check_exists("cluster CA cert", &self.cluster_ca_cert)?;
        let Some(dialect) = Dialect::of_mode(&self.mode) else {
            bail!(
                "mode must be set to either 'grpc' or 'http-connect' not {:?}",
                self.mode
            );
        };
        self.validate_frontend()?;
        self.validate_ports()?;
        self.shared.check_profiling()?;
        self.validate_token_auth()?;
        let path = &self.shared.kubeconfig;
        check_stat(&format!("checking KubeconfigPath {path:?}"), path)?;
        if self.proxy_strategies.is_empty() {
            bail!("ProxyStrategies cannot be empty");
        }
        let strategies = self
            .proxy_strategies
            .parse()
            .map_err(|error: StrategiesError| {
                ConfigError::new(format!("invalid proxy strategies: {error}"))
            })?;
        check_channel_size(self.xfr_channel_size)?;
        let tls = TlsPolicy::parse(&self.tls_min_version, &self.cipher_suites, warnings)?;
        match parse_labels(&self.lease_label) {
            Err(error) if self.enable_lease_controller => bail!("{error}"),
            Err(error) => warnings.push(format!("--lease-label is malformed ({error}) and unused")),
            Ok(_labels) => (),
        }
        for (name, time) in [
            ("graceful-shutdown-timeout", self.graceful_shutdown_timeout),
            ("backend-dial-timeout", self.backend_dial_timeout),
        ] {
            if time.0 < 0 {
                bail!("{name} must be >= 0, got {time}");
            }
        }
        Ok(Checked {
            dialect,
            strategies,
            tls,
        })
    }

    fn validate_frontend(&self) -> Result<(), ConfigError> {
        if self.uds_name.is_empty() {
            if self.server_ca_cert.is_empty() {
                bail!("server ca cert must be set when in TCP mode (uds-name is empty)");
            }
            return Ok(());
        }
        if self.server_port != 0 {
            bail!(
                "server port should be set to 0 not {} for UDS",
                self.server_port
            );
        }
        for (name, file) in [
            ("key", &self.server_key),
            ("cert", &self.server_cert),
            ("ca cert", &self.server_ca_cert),
        ] {
            if !file.is_empty() {
                bail!("server {name} should not be set for UDS");
            }
        }
        Ok(())
    }

    fn validate_ports(&self) -> Result<(), ConfigError> {
        let ports = [
            ("server", self.server_port),
            ("agent", self.agent_port),
            ("admin", self.admin_port),
            ("health", self.health_port),
        ];
        if let Some((name, port)) = ports
            .into_iter()
            .find(|(_, port)| *port > limits::COMPAT_PORT_MAX)
        {
            bail!("please do not try to use ephemeral port {port} for the {name} port");
        }
        // A unix socket needs no port: port 0 was accepted above.
        let first = usize::from(!self.uds_name.is_empty());
        let reserved = |(_, port): &(&str, i64)| *port < limits::COMPAT_PORT_MIN;
        match ports.into_iter().skip(first).find(reserved) {
            Some((name, port)) => {
                bail!("please do not try to use reserved port {port} for the {name} port")
            }
            None => Ok(()),
        }
    }

    fn validate_token_auth(&self) -> Result<(), ConfigError> {
        let tokens = TokenPlan::of_flags(
            &self.agent_namespace,
            &self.agent_service_account,
            &self.authentication_audience,
            &self.shared.kubeconfig,
            Rate::default(),
            AgentProof::Either,
        );
        // Upstream's order of checks.
        let is_wanted = !matches!(tokens, Ok(None));
        if is_wanted && !self.cluster_ca_cert.is_empty() {
            bail!("--cluster-ca-cert can not be used when agent authentication is enabled");
        }
        tokens.map(|_plan| ())
    }
}
