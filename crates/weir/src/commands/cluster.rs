//! `weir cluster`

use std::io::Read;
use std::path::{Path, PathBuf};

use weir_identity::{BadAnswer, Endpoint, Joiner, Key, Store, Token};
use weir_node::api::ApiError;
use weir_node::client::{Client, Signed};
use weir_node::cluster::views::{
    CertificateView, ClientMade, ClusterView, Invite, Invited, Joined, Made, NewClient, Revoke, Revoked,
    RevokedView, Rotate, RotationView, TokenView, Withdrawn,
};
use weir_node::cluster::{joining, setup};
use weir_node::config::Config;
use weir_node::timestamps::rfc3339;
use weir_node::units::count;

use super::confirm::confirm;
use super::{migrate_registry, rotation, trust};
use crate::cli::{ClusterCommand, OwnArgs};
use crate::cluster::any_node;
use crate::failure::Failure;
use crate::options::Global;
use crate::output::{list, note, print, table};

/// Longest token that is read from a file, in bytes; a longer one is none.
const LONGEST_FILE: u64 = 64 << 10;

/// Executes a `weir cluster` command.
pub fn run(global: &Global, command: ClusterCommand) -> Result<(), Failure> {
    match command {
        ClusterCommand::Init(own) => print(global.output, &init(&own)?, |made: &Made| {
            list(&[
                ("cluster", made.cluster.clone()),
                ("authority", made.authority.clone()),
                ("node", made.node.to_string()),
                ("keys", made.directory.display().to_string()),
            ])
        }),
        ClusterCommand::Invite { only_for, hosts, ttl, readmit } => {
            let invite = Invite { only_for, hosts, ttl_seconds: ttl.0.as_secs(), readmit };
            let invited = any_node(global)?.invite(&invite)?;
            let whom =
                invite.only_for.map_or_else(|| "any free name".to_owned(), |name| format!("node {name}"));
            // Beside the token, so that a script gets nothing but the token.
            note(&format!(
                "token {id} for {whom}, until {}; `weir cluster revoke --token {id}` withdraws it",
                invited.expires,
                id = invited.id
            ));
            print(global.output, &invited, |it: &Invited| it.token.clone())
        }
        ClusterCommand::Join { endpoint, token, token_file, own } => {
            let token = read_token(token, token_file.as_deref())?;
            print(global.output, &join(&own, &token, endpoint)?, |joined: &Joined| {
                format!(
                    "{} joined cluster {}; its key is in {}. Start the node",
                    joined.node,
                    joined.cluster,
                    joined.directory.display()
                )
            })
        }
        ClusterCommand::List => print(global.output, &any_node(global)?.cluster()?, show),
        ClusterCommand::Revoke { token: Some(token), .. } => {
            print(global.output, &any_node(global)?.withdraw(token)?, |it: &Withdrawn| {
                format!("token {} admits nobody any more", it.id)
            })
        }
        ClusterCommand::Revoke { name, client, reason, dry_run, lose_authority, yes, token: None } => {
            let name = name.ok_or_else(|| Failure::usage("a name is missing"))?;
            let node = any_node(global)?;
            let revoke = Revoke { name, client, reason, dry_run, lose_authority };
            if !dry_run && !yes {
                let would = node.revoke(&Revoke { dry_run: true, ..revoke.clone() })?;
                confirm(&revoked(&would), revoke.name.as_str())?;
            }
            print(global.output, &node.revoke(&revoke)?, revoked)
        }
        ClusterCommand::Rotate { finish, abandon, force, dry_run, no_wait } => {
            let rotate = Rotate { finish, abandon, force, dry_run, ..Rotate::default() };
            print(global.output, &rotation::run(&any_node(global)?, rotate, no_wait)?, rotation::text)
        }
        ClusterCommand::MigrateRegistry { config, from, dry_run } => {
            migrate_registry::run(global, &config, &from, dry_run)
        }
        ClusterCommand::Trust { directory } => {
            let node = any_node(global)?.of_own_authority()?;
            print(global.output, &trust::run(&node, &directory)?, trust::text)
        }
        ClusterCommand::Client { name, role, exports, directory, ttl } => {
            let (exports, ttl_seconds, csr) = (exports.into_iter().collect(), ttl.0.as_secs(), String::new());
            let wanted = NewClient { name, role, exports, csr, ttl_seconds };
            print(global.output, &client(&any_node(global)?, wanted, &directory)?, made)
        }
    }
}

/// Certificates are valid by the wall clock.
fn now() -> u64 {
    weir_node::unix_seconds()
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|error| Failure::failed(format!("cannot start the runtime: {error}")))
}

fn init(own: &OwnArgs) -> Result<Made, Failure> {
    let config = Config::load(&own.config)?;
    if config.api.listen.is_none() {
        note("the configuration does not set api.listen: set it before other hosts join, they ask there");
    }
    runtime()?.block_on(async {
        let registry = weir_node::registry(&config)?;
        Ok(setup::init(&config, &*registry, &own.hosts, now(), note).await?)
    })
}

fn join(own: &OwnArgs, token: &Token, endpoint: Option<Endpoint>) -> Result<Joined, Failure> {
    let config = Config::load(&own.config)?;
    let endpoints: Vec<Endpoint> = endpoint.into_iter().collect();
    Ok(runtime()?.block_on(joining::join(&config, token, &endpoints, &own.hosts, now, note))?)
}

fn read_token(token: Option<String>, file: Option<&Path>) -> Result<Token, Failure> {
    let mut text = token.unwrap_or_default();
    if let Some(path) = file {
        let read = if path == Path::new("-") {
            std::io::stdin().take(LONGEST_FILE).read_to_string(&mut text)
        } else {
            std::fs::File::open(path).and_then(|file| file.take(LONGEST_FILE).read_to_string(&mut text))
        };
        let of_file = |reason: &dyn std::fmt::Display| {
            Failure::usage(format!("--token-file {}: {reason}", path.display()))
                .hint("`weir cluster invite` on a node of the cluster prints a token")
        };
        read.map_err(|error| match error.kind() {
            std::io::ErrorKind::InvalidData => of_file(&"it is no text, and so no token"),
            _ => of_file(&error),
        })?;
        if text.trim().is_empty() {
            return Err(of_file(&"it is empty"));
        }
        return text.parse().map_err(|error: weir_identity::TokenError| of_file(&error));
    } else if text.is_empty() {
        return Err(Failure::usage("a token is missing: --token-file FILE, or --token TOKEN")
            .hint("`weir cluster invite` on a node of the cluster prints one"));
    }
    text.parse().map_err(|error: weir_identity::TokenError| Failure::usage(error))
}

/// Makes a key here, and has a node sign the certificate that `wanted` describes.
fn client(node: &Client, mut wanted: NewClient, directory: &Path) -> Result<ClientMade, Failure> {
    let grant = wanted.grant().map_err(Failure::usage)?;
    let store = Store::open(directory).map_err(ApiError::from)?;
    // Before a certificate is issued that could not be kept.
    store.check_no_client().map_err(ApiError::from)?;
    let key = Key::generate().map_err(Failure::failed)?;
    let joiner = Joiner::new(key, wanted.name.clone(), &[]).map_err(Failure::failed)?;
    wanted.csr = joiner.renewal().csr;
    let Signed { answer, pins } = node.new_client(&wanted)?;
    let made = joiner.complete_client(&answer, pins.as_deref(), grant, now()).map_err(|error| {
        let hint = match &error {
            BadAnswer::NotTrusted(_) => {
                "if a rotation of the authority is under way, run the command on the host of the node with the key, without \
                 --credentials"
            }
            _ => "",
        };
        Failure::failed(error).hint(hint)
    })?;
    store.create_client(&made.credentials, &made.authorities).map_err(ApiError::from)?;
    let certificate_ends = rfc3339(made.credentials.facts().not_after.saturating_mul(1000));
    let NewClient { name, role, exports, .. } = wanted;
    Ok(ClientMade { name, role, exports, directory: PathBuf::from(directory), certificate_ends })
}

fn made(it: &ClientMade) -> String {
    let ClientMade { name, role, exports, directory, certificate_ends } = it;
    let exports: Vec<String> = exports.iter().map(ToString::to_string).collect();
    let may = role.map_or_else(|| format!("may open {}", exports.join(", ")), |role| format!("is {role}"));
    format!(
        "{name} {may}; its key and certificates are in {}, and end at {certificate_ends}",
        directory.display()
    )
}

fn revoked(it: &Revoked) -> String {
    let verb = if it.done { "revoked" } else { "would revoke" };
    let mut text =
        format!("{verb} {} {}: {}", it.kind, it.name, count(it.certificates as u64, "certificate"));
    if let Some(RevokedView { at, reason, .. }) = &it.earlier {
        let because = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
        text = format!(
            "{} {} is revoked since {at}{because}: {}",
            it.kind,
            it.name,
            count(it.certificates as u64, "certificate")
        );
    }
    if !it.tokens.is_empty() {
        text += &format!(", {}", count(it.tokens.len() as u64, "token"));
    }
    if !it.open_tokens.is_empty() {
        let open: Vec<String> = it.open_tokens.iter().map(ToString::to_string).collect();
        text += &format!("\nopen tokens for any name stay: {}; whoever has one can join", open.join(", "));
    }
    if !it.owns.is_empty() {
        text += &format!("\nit owns {}: it destages and closes them, then stops", it.owns.join(", "));
    }
    if !it.copies.is_empty() {
        text +=
            &format!("\nit keeps copies of the logs of {}, whose owners replace it", it.copies.join(", "));
    }
    text
}

fn show(view: &ClusterView) -> String {
    let mut parts =
        vec![list(&[("cluster", view.cluster.clone()), ("authorities", view.authorities.join(", "))])];
    let renewing = view.rotation.as_ref().filter(|it| it.phase == RotationView::RENEWING);
    let former = renewing.and_then(|it| it.other.as_ref());
    let row = |one: &CertificateView| {
        let signs = if one.signs { "signs" } else { &*one.grant };
        let hosts: Vec<String> = one.hosts.iter().map(ToString::to_string).collect();
        // Of the two authorities of a rotation.
        let is_former = former.is_some_and(|former| one.authority == *former);
        let state = if is_former { format!("{}; former authority", one.state) } else { one.state.clone() };
        vec![one.kind.clone(), one.name.to_string(), signs.to_owned(), state, hosts.join(", ")]
    };
    parts.push(table(
        &["KIND", "NAME", "ROLE", "CERTIFICATE", "HOSTS"],
        &[],
        view.certificates.iter().map(row),
    ));
    if !view.tokens.is_empty() {
        let row = |one: &TokenView| {
            let name = one.only_for.as_ref().map_or_else(|| "any".into(), ToString::to_string);
            vec![one.id.to_string(), name, one.state.clone(), one.expires.clone()]
        };
        parts.push(table(&["TOKEN", "FOR", "STATE", "EXPIRES"], &[], view.tokens.iter().map(row)));
    }
    if !view.revoked.is_empty() {
        let rows = view
            .revoked
            .iter()
            .map(|one| vec![one.kind.clone(), one.name.to_string(), one.at.clone(), one.reason.clone()]);
        parts.push(table(&["REVOKED", "NAME", "AT", "REASON"], &[], rows));
    }
    parts.extend(
        view.rotation.as_ref().map(|it| format!("rotation of the authority:\n{}", rotation::text(it))),
    );
    parts.join("\n\n")
}
