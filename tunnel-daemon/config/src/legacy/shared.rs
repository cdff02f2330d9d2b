//! Common to both of upstream's programs: flags, checks in upstream's words, and parts of plans.

use std::path::{Path, PathBuf};

use super::klog::KlogOptions;
use super::options::options;
use crate::address::BindAddress;
use crate::error::{ConfigError, bail};
use crate::plan::{AccountPlan, DataPathPlan};
use crate::{files, limits};

options! {
    SharedOptions with klog: KlogOptions.logging_flags {
        admin_bind_address: Text("admin-bind-address", "address of admin requests; empty is all") = "127.0.0.1";
        enable_profiling: Bool("enable-profiling", "accepted; Go profiles do not exist here");
        enable_contention_profiling: Bool("enable-contention-profiling", "accepted; needs --enable-profiling");
        kubeconfig: Text("kubeconfig", "access to the Kubernetes API; empty is that of this pod");
        kube_api_content_type: Text("kube-api-content-type", "accepted; requests are JSON") = "application/vnd.kubernetes.protobuf";
        lease_namespace: Text("lease-namespace", "namespace of leases") = limits::LEASE_NAMESPACE;
        // Adit's flags, which upstream does not have.
        lane_security: Text("lane-security", "what protects lanes after their mutual TLS greeting: tls, ktls for raw lanes on kernel TLS, or plaintext for trusted networks") = "tls";
        relay_engine: Text("relay-engine", "what drives the relay of sockets in clear text: auto, io-uring or epoll") = "auto";
        account: Text("account", "count bytes, round-trip time and retransmissions of connections in the kernel by eBPF: off, auto or on") = "off";
        account_series_max: Int("account-series-max", "sets of labels that accounting makes series for") = limits::ACCOUNT_SERIES;
    }
}

impl SharedOptions {
    pub(super) fn check_profiling(&self) -> Result<(), ConfigError> {
        if self.enable_contention_profiling && !self.enable_profiling {
            bail!("if --enable-contention-profiling is set, --enable-profiling must also be set");
        }
        Ok(())
    }

    /// `flag` names the flag for the number of lanes in errors.
    pub(super) fn data_path(&self, flag: &str, lanes: i64) -> Result<DataPathPlan, ConfigError> {
        let Ok(lanes_max) = u32::try_from(lanes) else {
            let max = u32::MAX;
            bail!("{flag} {lanes} must be between 0, which is no lanes, and {max}");
        };
        Ok(DataPathPlan {
            lanes_max,
            lane_security: self
                .lane_security
                .parse()
                .map_err(ConfigError::about("--lane-security"))?,
            relay_engine: self
                .relay_engine
                .parse()
                .map_err(ConfigError::about("--relay-engine"))?,
        })
    }

    pub(super) fn account(&self) -> Result<AccountPlan, ConfigError> {
        let (value, max) = (self.account_series_max, limits::ACCOUNT_SERIES_MAX);
        let series_max = u32::try_from(value).ok().filter(|sets| *sets <= max);
        let Some(series_max) = series_max else {
            bail!("--account-series-max {value} must be between 0 and {max}");
        };
        Ok(AccountPlan {
            mode: self
                .account
                .parse()
                .map_err(ConfigError::about("--account"))?,
            series_max,
        })
    }
}

/// A key needs its certificate and the reverse; both files must exist. The key is checked first.
pub(super) fn check_pair(of: &str, cert: &str, key: &str) -> Result<(), ConfigError> {
    check_exists(&format!("{of} key"), key)?;
    if cert.is_empty() && !key.is_empty() {
        bail!("cannot have {of} cert empty when {of} key is set to {key:?}");
    }
    check_exists(&format!("{of} cert"), cert)?;
    if key.is_empty() && !cert.is_empty() {
        bail!("cannot have {of} key empty when {of} cert is set to {cert:?}");
    }
    Ok(())
}

pub(super) fn check_exists(what: &str, path: &str) -> Result<(), ConfigError> {
    check_stat(&format!("error checking {what} {path}"), path)
}

/// `doing` begins the error text, in upstream's words.
pub(super) fn check_stat(doing: &str, path: &str) -> Result<(), ConfigError> {
    if !path.is_empty() && files::is_missing(Path::new(path)) {
        bail!("{doing}, got stat {path}: no such file or directory");
    }
    Ok(())
}

pub(super) fn check_channel_size(size: i64) -> Result<(), ConfigError> {
    if size <= 0 {
        bail!("channel size {size} must be greater than 0");
    }
    Ok(())
}

/// An empty path means no file.
pub(super) fn file(path: &str) -> Option<PathBuf> {
    Some(path)
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
}

/// `what` names the flags in the error.
pub(super) fn bind(what: &str, host: &str, port: i64) -> Result<BindAddress, ConfigError> {
    BindAddress::new(host, port_of(what, port)?)
        .map_err(|why| ConfigError::new(format!("{what} bind address: {why}")))
}

pub(super) fn port_of(what: &str, port: i64) -> Result<u16, ConfigError> {
    u16::try_from(port).map_err(|_too_large| {
        ConfigError::new(format!("{what} port {port} must be less than 65536"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::AccountMode;

    #[test]
    fn invalid_account_values_name_the_flag() {
        let plan = |account: &str, account_series_max| {
            let options = SharedOptions {
                account: account.to_owned(),
                account_series_max,
                ..SharedOptions::default()
            };
            options.account()
        };
        let expected = AccountPlan {
            mode: AccountMode::On,
            series_max: 0,
        };
        assert_eq!(plan("on", 0).unwrap(), expected);
        for (account, series_max, flag) in [
            ("maybe", 1, "--account:"),
            ("on", -1, "--account-series-max"),
            ("on", 10_001, "--account-series-max"),
        ] {
            let error = plan(account, series_max).unwrap_err().to_string();
            assert!(error.contains(flag), "{error}");
        }
        assert_eq!(
            SharedOptions::default().account().unwrap().mode,
            AccountMode::Off
        );
    }
}
