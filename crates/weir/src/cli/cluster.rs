//! `weir cluster`

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, Subcommand};
use weir_identity::{Endpoint, ExportName, Host, Name, Role, TokenId};
use weir_node::units::Period;

use crate::completion;

pub const EXAMPLES: &str = "\
Examples:
  weir cluster init --host 10.0.0.1    on the first host, before its node starts
  weir cluster invite --for n2         on any node: prints a token
  weir cluster join --token-file F     on the new host, before its node starts
  weir cluster list
  weir cluster revoke n2 --reason stolen
  weir cluster revoke --token 0123456789abcdef
  weir cluster rotate                  on the host with the authority's key
  weir cluster trust --directory eve   after `rotate --finish`
  weir cluster client guest --export db --directory guest
  nbdinfo 'nbds://10.0.0.1/db?tls-certificates=guest'
  weir cluster client eve --role viewer --directory eve
  curl --cacert eve/ca-cert.pem --cert eve/client-cert.pem \\
       --key eve/client-key.pem https://10.0.0.1:7443/v1/status";

#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Make the cluster's certificate authority, and the certificate of this host's node, the first one.
    ///
    /// Run it once for a cluster, on its first host, before that node starts, as the user that the node runs as. The authority's key stays on
    /// this host, in identity.directory of the configuration: back it up. Refuses if the cluster in the registry has an authority.
    Init(OwnArgs),
    /// Print a token with which one host can join. Secret.
    ///
    /// The token is good for one host, and for a limited time. It carries the fingerprint of the cluster's authority, so that the
    /// host does not join another cluster by mistake, and the addresses where nodes answer (api.listen in their configurations).
    Invite {
        /// The only name under which the host may join.
        #[arg(long = "for", value_name = "NAME")]
        only_for: Option<Name>,
        /// A DNS name or address that the node's certificate may have beside its name; may be repeated.
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<Host>,
        /// Validity, 1min to 7d.
        #[arg(long, default_value = "1h", value_name = "TIME")]
        ttl: Period,
        /// Let a revoked name join again, with a new key. The name stays revoked until a host has joined with the token.
        #[arg(long, requires = "only_for")]
        readmit: bool,
    },
    /// Make this host a node of the cluster that made a token.
    ///
    /// Run it before the node starts, as the user that the node runs as. The name is that of the configuration. A lost answer costs nothing: run
    /// it again with the same token. Leave the key of the node where it is made: identity.directory.
    Join {
        /// Where a node answers, HOST:PORT; default: the addresses in the token.
        endpoint: Option<Endpoint>,
        /// The token. Other users of this host can see it in the list of processes.
        #[arg(long, env = "WEIR_TOKEN", hide_env_values = true, conflicts_with = "token_file")]
        token: Option<String>,
        /// A file with the token, or - for standard input.
        #[arg(long, value_name = "FILE")]
        token_file: Option<PathBuf>,
        #[command(flatten)]
        own: OwnArgs,
    },
    /// Certificates of nodes and clients, open tokens, what is revoked.
    List,
    /// Revoke a node or a client: all its certificates, and the tokens for it.
    ///
    /// Its connections end at once on every node that the registry reaches, and a revoked node that runs destages and closes its disks and
    /// stops. It cannot come back with its old key or an old token; `weir cluster invite --readmit --for NAME` lets a host with a new
    /// key join under the name.
    Revoke {
        /// The node's name, or the client's.
        #[arg(required_unless_present = "token", add = completion::certified())]
        name: Option<Name>,
        /// Withdraw a token that was not used yet, by its id, instead.
        #[arg(long, value_name = "ID", conflicts_with_all = ["name", "client", "reason", "dry_run"], add = completion::tokens())]
        token: Option<TokenId>,
        /// It is a client.
        #[arg(long)]
        client: bool,
        /// Why, for people.
        #[arg(long, default_value = "")]
        reason: String,
        /// Only say what would be revoked.
        #[arg(long)]
        dry_run: bool,
        /// Also revoke the last node that has the authority's key: no host can join afterwards, and no certificate be renewed.
        #[arg(long)]
        lose_authority: bool,
        /// Revoke without asking.
        #[arg(long)]
        yes: bool,
    },
    /// Replace the cluster's certificate authority by a new one, while everything runs.
    ///
    /// Run it on the node that has the authority's key (`weir cluster list` shows which), or with --credentials on any. First all nodes hear of the new authority; as soon
    /// as every one trusts it, it signs, and each node renews its certificate at once. Nodes show clients their former certificates
    /// until --finish removes the former authority. Before that, make new certificates for clients: `weir cluster client` with
    /// another directory. `weir cluster list` shows who is left. An unused token names only the former authority: the rotation waits
    /// until it has expired or is withdrawn. Run it again after an interruption: it goes on. Back up the directory of keys as soon as the
    /// new authority signs.
    Rotate {
        /// Remove the former authority. Refuses while a node, or a client's certificate that has not ended, depends on it.
        #[arg(long, conflicts_with = "abandon")]
        finish: bool,
        /// Take the rotation back, while the new authority signs nothing yet.
        #[arg(long)]
        abandon: bool,
        /// Do not wait for nodes that are down and for clients, and withdraw unused tokens. Such a node has to join again after
        /// --finish.
        #[arg(long, conflicts_with = "abandon")]
        force: bool,
        /// Only show who would be waited for.
        #[arg(long, conflicts_with_all = ["abandon", "no_wait"])]
        dry_run: bool,
        /// Do not wait until the nodes have new certificates.
        #[arg(long)]
        no_wait: bool,
    },
    /// Remove from a client's files the authorities that the cluster does not trust any more.
    ///
    /// Files that `weir cluster client` makes during a rotation name both authorities. Run this after `weir cluster rotate --finish` where
    /// the files are, in particular if the key of the former authority was stolen. It replaces ca-cert.pem at once, and adds no
    /// authority. Restart programs that have read the file. The node that is asked is chosen by --api, and by --credentials if that is
    /// another host's; that one must have a certificate of the authority that signed the client's own.
    Trust {
        /// The directory with the client's three files.
        #[arg(long, value_name = "DIR")]
        directory: PathBuf,
    },
    /// Copy the registry of one machine to etcd.
    ///
    /// Stop all nodes and `weir registry` first. Copies what the file has to the etcd in the configuration, under a prefix without keys, and
    /// compares all of it. From then on nodes refuse the file. If it is interrupted, run it again: it goes on. Disks keep their
    /// epochs.
    MigrateRegistry {
        /// A node's configuration, with registry.etcd.
        #[arg(long, value_name = "FILE", default_value = "/etc/weir/weir.toml")]
        config: PathBuf,
        /// The file of the registry: --file of `weir registry`.
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        /// Only say what would be copied.
        #[arg(long)]
        dry_run: bool,
    },
    /// Make the key and certificate of a client of the API, or of exports.
    ///
    /// Run it on a node that has the authority's key (`weir cluster list` shows which). Writes client-key.pem, client-cert.pem and
    /// ca-cert.pem, as libnbd, nbdkit and QEMU expect them. With --role the client reaches a node's api.listen; with --export it sees and
    /// opens these disks, and no others, where NBD requires TLS. A certificate is good for one of the two.
    #[command(
        group(ArgGroup::new("grant").required(true).args(["role", "exports"])),
        override_usage = "weir cluster client --role <ROLE> --directory <DIR> [OPTIONS] <NAME>\n       \
                          weir cluster client --export <DISK> --directory <DIR> [OPTIONS] <NAME>"
    )]
    Client {
        /// The client's name; the audit log shows it.
        name: Name,
        /// viewer: look; operator: also change disks, volumes and nodes; admin: also invite and revoke.
        #[arg(long, value_parser = PossibleValuesParser::new(["viewer", "operator", "admin"]).try_map(|role| role.parse::<Role>()))]
        role: Option<Role>,
        /// A disk that the client may open over NBD with TLS, also one that does not exist yet; may be repeated.
        #[arg(long = "export", value_name = "DISK")]
        exports: Vec<ExportName>,
        /// A directory for the three files; made if it does not exist.
        #[arg(long, value_name = "DIR")]
        directory: PathBuf,
        /// Validity, from 10min.
        #[arg(long, default_value = "30d", value_name = "TIME")]
        ttl: Period,
    },
}

#[derive(Debug, Args)]
pub struct OwnArgs {
    /// The configuration of this host's node.
    #[arg(long, value_name = "FILE", default_value = "/etc/weir/weir.toml")]
    pub config: PathBuf,
    /// A DNS name or address for the node's certificate beside its name, where clients other than Weir reach it; may be repeated.
    #[arg(long = "host", value_name = "HOST")]
    pub hosts: Vec<Host>,
}
