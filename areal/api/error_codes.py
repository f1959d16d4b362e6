"""Every error code with its cause and its fix. `make docs` writes `docs/errors.md` from this table."""

import itertools
import sys
from dataclasses import dataclass

from areal.api.alarm_rules import ALARM_RULES

_TABLE = """
areal.error: An error without a more specific code.
    Read the message.

adapter.no_target: An entry of lora.target_modules, exclude_modules or modules_to_save matches no module.
    Use names of the list in the message.
adapter.none: An adapter is requested of a model that was trained without actor.lora.
    Export the whole model, without --adapter.
adapter.not_readable: A folder is no LoRA adapter in the format of peft.
    Give a folder with adapter_config.json and adapter_model.safetensors.
adapter.other_base: A LoRA adapter was trained on another base model.
    Set actor.path to the model that the adapter was trained on.
adapter.other_settings: A LoRA adapter has other settings or weights than actor.lora, or an option that areal lacks.
    Set the options of actor.lora to those in the message, or use another adapter.
adapter.rank: lora.rank is above the size of a module, and lora.init takes that many singular vectors from it.
    Lower lora.rank, or use lora.init=default.

agent.cut_not_invariant: An option of the actor would make the update depend on how sessions are cut into rows.
    Use the option that the message names; docs/algorithms.md lists the combinations.
agent.drift: A request continues an answer whose rendered tokens differ, and agent.on_drift is reject.
    Set agent.on_drift to fork or realign, or have the agent send back messages unchanged.
agent.failed: No session of an episode has a reward, because the agent raised an error or its process ended.
    Correct the agent, or the rows, as the message says; `areal test-workflow` runs one episode.
agent.generation_failed: The servers failed to answer a turn of a session.
    Read the message and the logs of the servers.
agent.invalid_field: A field of a request to a session has a wrong type or value, or is missing.
    Correct the field that `param` names; docs/http.md has the limits.
agent.multimodal: A request to a session has audio, a file or a video, or an image for a policy of text only.
    Send text, and images to a policy that takes them.
agent.no_agent: workflow=agent got none or several of agent, command, environment or tools, and online.
    Set exactly one of them in workflow_args.
agent.no_messages: Tools without an environment need the first messages in the row.
    Add a column `messages` or `prompt`, or give workflow_args.environment.
agent.no_place: A program from outside requested a session, and no episode waits for one (429).
    Ask again after the seconds in Retry-After; the policy trains on the sessions that it has.
agent.no_route: A request to the session server has an unknown path or method.
    Use the base URL of the session; docs/http.md has the routes.
agent.no_server: No server was available for a turn of a session (503).
    Repeat the request, as the SDKs do; look at the logs of the servers if it stays so.
agent.not_startable: The agent of a rehearsal cannot be imported or started.
    Correct what the message names; areal rehearse takes file.py:function, module:function or --command.
agent.plain_prompt: A session that takes messages or token ids got a prompt of text.
    Send messages, or token ids.
agent.prompt_too_long: The prompt of a turn leaves no room for an answer within gconfig.max_tokens.
    Raise gconfig.max_tokens, or have the agent end earlier or shorten its history.
agent.remote_image: A request to a session has an image at an address, or a file id; nothing is downloaded.
    Send the image as a data URL: data:image/png;base64,...
agent.request_refused: The servers refused the request of a turn.
    Read the message, and correct the request or gconfig.
agent.reward_too_late: A reward came for a session that has ended (409).
    Report it earlier, or raise agent.reward_window_s.
agent.session_ended: A turn came after the end of its session.
    Send no turns after the final reward or the end of the agent.
agent.template_refused: The chat template refuses the messages of a request, for example the order of their roles.
    Send messages that the template takes: areal prove-template shows what it refuses.
agent.time_budget: A session has used agent.max_seconds.
    End the agent after this refusal, or raise the limit.
agent.token_budget: A session has used agent.max_tokens.
    End the agent after this refusal, or raise the limit.
agent.turn_budget: A session has used agent.max_turns.
    End the agent after this refusal, or raise the limit.
agent.unknown_field: A request to a session has a field that its dialect does not have.
    Remove the field that `param` names; it would change nothing.
agent.unknown_session: The key of a request belongs to no session, or the session has ended.
    Use the base URL and the key that the session was opened with.
agent.unknown_turn: A reward names no turn of its session.
    Give the id of a completion or a tool call of the session, or the number of a turn from 0.
agent.unsupported_field: A request to a session has a field or value of its dialect that areal does not support.
    Remove the field that `param` names, or use a value of docs/http.md.
agent.wrong_reward: An agent returned something that is no finite number as a reward.
    Return a number, None, or a mapping with `reward`, `turns` and named numbers.
agent.wrong_step: The step of an environment returned something else than (messages, reward, done).
    Return a list of messages, a number and a bool.

algorithm.custom_advantage: The function at actor.custom_advantage.path did not return one number per token.
    Return a floating-point tensor of the shape of answers.mask.
algorithm.no_reward_parts: No reward function in actor.gdpo_weights scored an answer of the train batch.
    Use the names in the metrics reward/NAME; scores are recorded with reward.fns or reward.by_source.
algorithm.not_finite: A train batch holds NaN or infinity in a reward or at a trained token.
    Check the reward function and the model; for remax, check that the workflow generates greedy answers.
algorithm.shapes_differ: Tensors that must have one shape have several: a custom loss or a stage made a wrong one.
    Make the tensor that the message names one number per token or per sequence, as the others.

allocation.invalid: allocation_mode has invalid syntax or contradictory sizes.
    Follow the hint at the marked column.

benchmark.no_rollouts: areal benchmark got a configuration without rollouts.
    Give the configuration of a run with an actor and servers.
benchmark.run_failed: A run of areal benchmark failed; its own error is above.
    Correct its cause, and start the benchmark again.
benchmark.too_few_steps: A run of areal benchmark ended before the steps to be measured.
    Read the run's logs.

checkpoint.ahead_of_ledger: The newest events of the ledger were lost, and every recovery checkpoint needs them.
    Restore the ledger folder, or do what the message says to continue without it.
checkpoint.damaged: A file of a checkpoint is cut short, changed, or contradicts the index.
    Copy or download it again.
checkpoint.incomplete: A checkpoint folder lacks its configuration or its weights.
    Give a complete Hugging Face checkpoint.
checkpoint.missing: There is no recovery checkpoint to continue from.
    Use recover.mode=auto to start from the beginning.
checkpoint.none_to_resume: recover.mode=resume needs a complete recovery checkpoint, and there is none.
    Set recover.mode=auto.
checkpoint.not_written: A checkpoint or an export could not be written.
    Free disk space or correct the permissions, then start again.
checkpoint.other_base: A recovery checkpoint has adapters of another base model or with other settings, or none.
    Use the actor.path and actor.lora of the run that wrote it, or change trial_name.
checkpoint.other_run: A recovery checkpoint belongs to another model, allocation_mode or version.
    Use the configuration it was written with, or change trial_name to start a new run.

command.no_metric: None of the runs has recorded a metric of this name or pattern.
    Use a name in metrics.jsonl, for example rollout/reward, or a pattern such as 'eval/*'.
command.not_written: A command cannot write the requested files.
    Name a folder that can be written, on a disk with free space.
command.unknown: The command `areal` has no subcommand of this name.
    Use one of those that `areal --help` lists.

config.bad_override: A word on the command line is no flag, or no override that can be read and applied.
    Write key.sub=value with a YAML value, or ~key to restore the default.
config.bad_reference: A function or class is not registered, or cannot be found, here or by other processes.
    Use a registered name, module:name or file.py:name of a function or class at the top level of that module.
config.conflict: A value makes no sense, alone or together with another option.
    Change one of the options that the message names.
config.invalid: The configuration has problems of several kinds.
    Fix each line of the message; each has its own code.
config.missing_requirement: An option needs another one that is not set.
    Set the option that the message names.
config.mixed_kinds: The file has sections of different kinds of training.
    Keep the sections of one kind of training.
config.no_effect: strict_config is true and an option has no effect under the other options.
    Remove the option, or set strict_config to false.
config.not_a_choice: The option takes one of a few words.
    Use one of the words in the message.
config.out_of_range: A number is outside the range of its option, or not finite.
    Use a number in the range of the message.
config.output: The file that `areal config import` shall write exists, or is the file that it reads.
    Choose another file with -o, or replace an old one with --overwrite.
config.required: An option that has no default is not given.
    Give it in the file or on the command line.
config.unknown_key: There is no option of this name.
    Correct the spelling, or remove the key; `areal config SECTION` lists the options of a section.
config.unreadable_file: The given file is missing, not UTF-8, not YAML, has no mapping, or is of another system.
    Give a YAML file with a mapping of keys to values, and fix the place that the message names.
config.unresolved_interpolation: An interpolation ${...} names itself, or an option or variable without a value.
    Correct the name, set the environment variable, or write the value.
config.unsupported: The configuration needs a feature that this version does not have.
    Remove the option, or use the alternative in the message.
config.wrong_function: An option names a value, an async function, a class or a function with other parameters.
    Name a plain function that accepts the call in the message.
config.wrong_type: A value has another type than its option, or cannot be stored.
    Give a value of the type in the message; put text that reads as another type in quotes.

data.cache_dir: The folder in cache_dir of a dataset cannot be written.
    Name a folder that the user of the run may create and write, or leave the option out.
data.chat_template: The tokenizer has no chat template, or one that cannot render several turns.
    Use the tokenizer of a chat model, or rows with a column `prompt` of plain text.
data.chat_template_file: The file in chat_template.path cannot be read as text in UTF-8.
    Correct chat_template.path: it names a file with a Jinja template that every machine of the run reads.
data.curriculum_failed: The function in train_dataset.curriculum raised an error or returned no list of rows.
    Return a list with at least one row; test it on the rows that load_rows returns.
data.image_broken: The bytes of an image are no image, or are incomplete.
    Correct or remove it; rows and sessions may have PNG, JPEG, WebP, GIF, BMP and TIFF, requests to a server PNG only.
data.image_changed: A file in the folder `images` of a run is not what was written: its digest differs.
    Restore the file from a copy of the run folder, or delete it and start the run again from its dataset.
data.image_missing: A trajectory refers to an image whose file is not in the folder `images` of the run.
    Restore the folder, which belongs to the ledger. Ranks on several nodes need it on a shared file system.
data.image_not_found: A row names an image file that does not exist or cannot be read.
    Correct the path, or set vision.root to the folder of relative paths.
data.image_size: An image has a size that the vision tower does not take, or more pixels than allowed.
    Resize it to the multiples and the limit in the message before it is sent.
data.image_tokens: The image placeholders of a prompt or trajectory do not belong to its images.
    Use the tokenizer and the image processor of the model, and one placeholder for each image.
data.image_too_large: An image has too many pixels to be decoded safely, or is extremely long.
    Reduce it to at most 67 million pixels, with one side at most 200 times the other.
data.inconsistent_batch: The arrays of a batch have different lengths.
    Report it as a bug, unless your own code builds the batch.
data.invalid_column: A column of a dataset row has the wrong type or an unusable value.
    Correct the row, or drop or convert such rows with a map_fn.
data.invalid_file: A dataset file is not in the format that its name ends in, or a row is not an object.
    Correct the file at the line or row that the message names.
data.map_fn_failed: The map_fn of a dataset raised an error on a row.
    Correct the map_fn, or choose another map_fn or dataset.
data.missing_column: A dataset row lacks the columns that its type needs.
    Set columns or a map_fn that creates them, or add them to the data.
data.no_datasets_library: A hub dataset or a saved folder needs the `datasets` library, which is not installed.
    Run pip install -e '.[hub]', or convert the dataset to .jsonl.
data.no_pillow: A run with images needs the package pillow, which is not installed.
    Run pip install -e '.[vision]'.
data.no_pyarrow: A dataset in Parquet or Arrow format needs the package pyarrow, which is not installed.
    Run pip install -e '.[parquet]', or convert the dataset to .jsonl.
data.no_rows: A dataset has no usable rows.
    Check its path, split, map_fn and max_length.
data.no_tokenizer: There is no tokenizer at the given path or hub name, or it cannot be loaded.
    Correct tokenizer_path, or the model's path. If a run makes the folder, such as a warm-up, start that run first.
data.no_traces: A run folder contains no trace files.
    Run with perf_tracer.enabled=true, or name another folder.
data.not_found: A dataset file, hub dataset or split does not exist or cannot be loaded.
    Correct the dataset's path, name or split.
data.other_rows: The dataset has another number of rows than the run had, so a row number means another row.
    Restore the dataset, or leave out --row.
data.routed_experts: A batch has routed experts of another number of layers or experts than the model.
    Serve the checkpoint that the trainer trains.
data.rows_failed: The function in the path of a dataset raised an error.
    Correct it; it takes no argument and returns or yields rows.
data.template_refused: The chat template raises an error for a dialogue.
    Correct the messages that the error names; `areal prove-template` shows which dialogues the template takes.
data.template_stop: The chat template writes no token that ends an answer, or one that is no single token.
    Declare the stop tokens of the model, or use the tokenizer that belongs to the template.
data.token_id: A train batch contains a token id outside the model's vocabulary.
    Check what the workflow returns, and that the tokenizer belongs to the model.
data.too_few_rows: A dataset has fewer usable rows than one batch needs.
    Lower train_dataset.batch_size, or add data.
data.too_long: A dataset row, or a sequence of a train batch, has more tokens or patches than its limit.
    Raise max_length or the limit of mb_spec that the message names, shorten the texts, or choose another truncation.
data.too_many_images: A row, or the messages of a request to a session, have more images than vision.max_images.
    Raise vision.max_images, drop such rows with a map_fn, or have the agent send fewer images.
data.uneven_units: mb_spec.granularity does not divide the number of sequences of a rank.
    Choose a granularity that divides the number of sequences of every rank.

evaluate.no_data: An evaluation has no held-out set, or two of the same name.
    Give --data FILE or --data NAME=FILE, or set valid_dataset.
evaluate.no_export: The run that --model names has no export of its policy, or not at that step.
    Choose a step that the message names, or make an export from a recovery checkpoint with areal export --recover.
evaluate.no_generation: The configuration file is for a training that generates no answers (SFT, DPO, a reward model).
    Give a PPO or GRPO file, or no file and the options on the command line.
evaluate.no_model: An evaluation names no model.
    Give --model with a checkpoint folder, a hub name or a run, or set actor.path.
evaluate.no_output_column: A line of a file with generations has no text in the column of the answers.
    Name the column with --column; it holds a text, or a list of texts for several samples.

export.folder: The folder that `areal export` shall write exists.
    Choose another folder with -o.
export.no_checkpoint: The run has no checkpoint of this step, of this kind (export or recovery) or of this model.
    Use a step, --recover or a --role that the message names.

fleet.closed: A request was waiting when its fleet was closed.
    None: the controller is ending.
fleet.host_command: areal.fleet.server_host was started without a server command, or with a wrong configuration.
    Call it as its --help describes.
fleet.invalid_address: The address of a server is not of the form http://host:port.
    Correct the address in rollout.server_addrs or in the registry.
fleet.no_answer: A server did not accept a connection or lost it during an answer.
    Read the log of the server; its requests continue on other replicas.
fleet.no_live_replica: No replica serves the current policy version.
    Read the reason of each replica in the message, then the log of the servers.
fleet.not_ready: Not all inference servers became healthy within rollout.setup_timeout after they had loaded.
    Read the log of the servers that the message names, or raise rollout.setup_timeout.
fleet.replica_lost: A replica was disconnected or replaced during a weight update.
    Read the log of that server; the launcher restarts it and the trainer publishes again.
fleet.too_many_retries: More replicas failed during one request than rollout.request_retries allows.
    Read the log of the servers for the failure that the message quotes, or raise rollout.request_retries.
fleet.unknown_backend: allocation_mode or a command line names an inference backend that areal does not have.
    Use a backend listed in docs/servers.md.
fleet.update_failed: A replica, or every replica, failed to install new weights.
    Fix the cause that the message quotes for each replica, usually a folder, a network or a memory problem.

launch.attached_needs_disk: Attached servers on other machines cannot receive weights over a collective or HTTP.
    Set actor.weight_update_mode=disk, with cluster.fileroot in a shared folder.
launch.attached_silent: A server that should already run gives no HTTP answer.
    Start it, or correct rollout.server_addrs.
launch.bad_env_vars: A list of environment variables in the configuration is not NAME=value,NAME=value.
    Correct the list.
launch.bad_server_addresses: Addresses of attached servers are invalid, or environment and configuration differ.
    Correct AREAL_LLM_SERVER_ADDRS or rollout.server_addrs.
launch.cannot_start: A program of the run could not be started.
    Check the path that the message names and its permissions.
launch.cannot_write: The launcher cannot write its own files in the run folder.
    Make room on the disk, or choose another folder.
launch.disk_full: A disk is full.
    Make room on it, or set cluster.fileroot to another disk.
launch.earlier_run: The run folder contains an earlier run, which recover.mode would overwrite.
    Change trial_name, delete the folder, or set recover.mode=auto to continue the run.
launch.first_row: The trial of row 0, which runs before a run starts, failed with the quoted error.
    Fix the error; areal test-workflow runs one episode and shows more.
launch.folder_not_shared: The working directory or the run folder does not exist on a node.
    Use a file system that all nodes mount at the same path, for the code and for cluster.fileroot.
launch.missing_inputs: The configuration names absent or unusable files, models, functions or trackers; see the message.
    Correct the listed keys.
launch.no_answer: No launcher runs on the run folder, or it does not answer in time.
    Look at the output of the run's launcher.
launch.no_common_transport: Trainers and servers have no common library for collective weight updates.
    Set actor.weight_update_mode to auto or disk, or install the same NCCL in both environments.
launch.no_gpu: The configuration asks for a GPU, and none is available.
    Use the device auto or cpu, or make a GPU visible.
launch.no_launcher: A script was run without a launcher.
    Run it with areal run SCRIPT --config CONFIG.yaml.
launch.no_node_chosen: launcher.nodelist and launcher.exclude leave no host of --hosts or node of Slurm.
    Correct the names in the two options: they must be written as in --hosts, without user and port, or as in sinfo.
launch.no_ray: The Ray launcher cannot connect to a Ray cluster.
    Run it on a node of the cluster (ray start), correct RAY_ADDRESS or the token of Ray, or use ray job submit.
launch.no_run_folder: The folder given to a command is not a run folder.
    Give the folder that the launcher printed at its start.
launch.node_lost: A node of the run stopped answering, or its connection closed.
    Look at the node: the message has its last error line. Its processes start on other nodes that have room for them.
launch.node_unreachable: The agent of a node cannot be started, or a node cannot resolve the name of another one.
    Correct the name or address of the node, its login, or the path of Python; the message has the last error line.
launch.not_a_run: --overwrite would delete a folder that contains no run.
    Choose another trial_name, or delete the folder by hand.
launch.other_version: A node has another version of areal than the launcher.
    Install the same version on all nodes.
launch.out_of_memory: The memory limit of a job or container was reached, and the kernel ended a process of the run.
    Give it more (Slurm: launcher.trainer_mem_per_gpu, launcher.inference_server_mem_per_gpu), or use smaller sizes.
launch.package_missing: An option needs a Python package that is not installed.
    Install the extra that the message names.
launch.port_closed: A node accepts no TCP connection of another node at a free port, for example because of a firewall.
    Open all TCP ports between the nodes: each process of a run lets the system choose its ports.
launch.ray_busy: Ray did not reserve the CPUs and GPUs of the run in time.
    Wait until other jobs end, use smaller sizes, or a longer cluster.node_connect_s; ray status shows who uses them.
launch.ray_too_small: The Ray cluster has fewer living nodes with CPUs than cluster.n_nodes.
    Start more nodes, or use a smaller cluster.n_nodes.
launch.request_refused: The running launcher refuses to add or remove a replica.
    Read the message; it says which condition is missing.
launch.run_in_use: Another launcher, or processes that one left behind, work on the run folder.
    Stop them (the message has the process ids), or change trial_name.
launch.server_too_large: A server needs the GPUs of several machines, which this kind of server cannot use.
    Use sglang or vllm servers, or a smaller tensor-parallel size in allocation_mode.
launch.several_nodes: The configuration needs several machines, and the local launcher runs on one.
    Choose another launcher (--launcher, --hosts or launcher.type), or set cluster.n_nodes=1.
launch.slurm_kill_wait: launcher.stop_grace_s is not below the KillWait of Slurm, which would kill the launcher first.
    Set launcher.stop_grace_s to less than the KillWait that scontrol show config prints.
launch.slurm_refused: Slurm refuses the job, or to put it back into the queue; the message quotes its reason.
    Change cluster.n_nodes, cluster.n_gpus_per_node or the option of launcher.slurm that the reason names.
launch.slurm_silent: The commands of Slurm are not installed on this machine, or its controller does not answer.
    Run the command on a login node; try sinfo there.
launch.token_invalid: The token has characters that cannot be sent in an HTTP header.
    Set AREAL_SERVER_TOKEN to letters, digits and punctuation, without spaces.
launch.token_mismatch: Two processes of a run, or the run and a server that it uses, have different tokens.
    Give AREAL_SERVER_TOKEN the same value everywhere.
launch.token_missing: A server or store was started by hand without the token that it must require.
    Set the environment variable AREAL_SERVER_TOKEN to a secret. A launcher does this for its processes.
launch.too_few_gpus: The allocation needs more GPUs than are available.
    Use smaller sizes in allocation_mode, or more GPUs.
launch.tracker_failed: A metrics tracker did not start.
    Read its message, or set its mode to disabled.

ledger.bad_payload: The payload of an episode is missing, damaged or belongs to another episode.
    Restore the ledger folder from a copy, or move it away to continue from a checkpoint; the audit lists the episodes.
ledger.behind_trainer: A trainer has done more steps than the ledger records, because its newest events were lost.
    The launcher restarts the trainers from an earlier checkpoint; find out who deleted or truncated ledger files.
ledger.broken_rule: An event contradicts the events before it.
    Report the output of the ledger audit as a defect of areal; a new trial_name starts a new ledger.
ledger.damaged: Events that were on disk are damaged or missing.
    Restore the ledger folder from a copy, or move it away to continue from a checkpoint.
ledger.locked: Another process writes the ledger of this run.
    End the process that the message names, then start again.
ledger.not_found: There is no ledger, episode or batch at the given path or number.
    Name the folder of a run whose controller has started, and an existing episode or step.
ledger.not_writable: The ledger folder cannot be opened or written, for example because the disk is full.
    Free disk space or restore access, then start the same command again; no recorded data is lost.
ledger.other_data: The data settings differ from those with which the ledger of this run was started.
    Restore the settings that the message names, or choose a new trial_name.
ledger.other_run: The recovery checkpoint of the trainer is older than the first batch in the ledger.
    Restore a later checkpoint or the ledger of the earlier steps, or choose a new trial_name.
ledger.pruned: The payload of an episode was deleted on purpose, as rollout.keep_payloads says.
    Replay from a recovery checkpoint; for later runs set rollout.keep_payloads=all.
ledger.unknown_event: The ledger holds an event that this version of areal does not know.
    Continue the run with the version of areal that wrote it, or a newer one.

loss.custom_result: The function at actor.custom.path did not return a PolicyLoss with one loss per token.
    Return PolicyLoss(losses=..., stats=...) with losses of the shape of tokens.mask.

model.attention_unavailable: actor.attn_impl selects a kernel that this device, dtype or dropout does not allow.
    Use attn_impl=auto or attn_impl=sdpa.
model.cache_too_small: The KV cache cannot hold one request of full length.
    Increase native.max_total_tokens or lower native.context_length.
model.cannot_split: The trainer ranks cannot split the model: a size does not divide, or its family has no plan.
    Use sizes in allocation_mode that the message names.
model.context_length: native.context_length exceeds the limit of the model, or the model states no limit.
    Set native.context_length to a value within the limit of the model.
model.image_processor: The image processor of a model is missing where images come, or belongs to another model.
    Copy preprocessor_config.json from the folder of the model that actor.path names.
model.liger_unavailable: logprob_kernel=liger cannot run with this device, these outputs or this liger-kernel.
    Use logprob_kernel=torch, or install the version that the message names.
model.no_compiler: actor.compile=true needs a C++ compiler on the CPU, and there is none.
    Install g++, set CXX to another compiler, or use compile=false.
model.no_images: A batch has images, and the model takes none, or belongs to a family that areal lacks.
    Name a model for images in actor.path; docs/vision.md has the families.
model.no_router: A router option is set for a model without experts, or with routers that cannot follow it.
    Remove router_replay, router_aux_loss_coef or router_bias_update_rate, as the message says.
model.no_such_weight: A pattern of freeze or optimizer.lr_of matches no weight of the model.
    Use a regular expression that matches names of the model, such as visual, or remove it.
model.not_found: There is no model at the given path or hub name.
    Set the path to the folder of a Hugging Face checkpoint, or to an existing hub name.
model.not_loadable: transformers cannot load the model or its tokenizer.
    Read the error that the message quotes; the checkpoint may be incomplete or need a newer transformers.
model.unknown_layer_class: fsdp.wrap_policy names a layer class that the model does not have.
    Use one of the classes that the message lists.
model.unsupported: The native server or the train engine does not support this architecture.
    Use sglang or vllm servers; docs/train_engines.md lists the families that can be trained.
model.vision_layout: The vision tower of this checkpoint makes other tokens of an image than areal counts.
    Use a checkpoint that docs/vision.md names for its family.
model.weights_do_not_fit: Weights are missing or have other shapes than the model.
    Use a checkpoint of the same model as config.json describes.

process.bad_context: The environment variable AREAL_PROCESS does not contain what a launcher writes there.
    Unset it.
process.bad_name: A name for the registry contains characters that are not allowed.
    Use letters, digits, '_', '-' and '.'.
process.cannot_listen: A process cannot listen on the address or port that it needs.
    Choose a free port and a local address.
process.cannot_start: The program of a process does not exist or cannot be executed.
    Correct the path in the message.
process.local_folder: The folder areal-UID below TMPDIR belongs to another user, or others can write to it.
    Remove it, or set TMPDIR to a folder of this user.
process.name_taken: Another process is registered under the same name.
    Stop the other run, or change trial_name.
process.not_registered: A process that another one needs did not register in time.
    Look at its log, or raise the time limit.
process.rank_missing: Trainer rank 0 did not register in time.
    Read the log of trainer-0 for the cause.
process.registry_refused: etcd refused a request of the name registry.
    Read the reason in the message: the address may be that of another service, or etcd requires a user.
process.registry_silent: No member of the etcd cluster, or no actor of the run in Ray, answered in time.
    Start etcd, correct cluster.name_resolve.etcd3_addr, or raise etcd_timeout_s. With Ray: start the run again.

replay.damaged_run: A file of the run folder cannot be read or is incomplete.
    Restore the file that the message names.
replay.folder: The folder of a replay cannot be created.
    Choose another --name, or free the path.
replay.no_run: The folder is not that of a run that trained on rollouts.
    Name the folder of a run with a ledger and at least one train step.
replay.no_such_step: The run has no batches or checkpoint at the given step.
    Choose a step that the message names.
replay.old_record: An episode of an agent does not record the dialogues of its sessions, which reward functions get.
    An earlier version of areal made the run: replay it with that version, or without new reward functions.
replay.other_weights: The initial model differs from that of the run.
    Restore the old model, or use --from-checkpoint STEP.
replay.override: An override has no effect in a replay, or would need other data.
    Remove the overrides that the message lists.
replay.rank_failed: A rank of the replay exited with an error.
    Read the log that the message names.
replay.regrade: The recorded answers cannot be scored again: their workflow or dataset does not allow it.
    Restore the dataset that the message names; runs of other workflows keep their rewards.

request.broken_body: The body of a request ends early, or is not encoded as its headers say.
    Send the number of bytes that Content-Length says, or valid chunks.
request.content_type: The body of a request is not declared as JSON, or is compressed.
    Send the header Content-Type: application/json, and no Content-Encoding.
request.duplicate_id: A generation request has the rid of a request that is still running.
    Use a unique rid for each request.
request.engine_failed: The engine of the native server failed or hangs.
    Read the log of the server; the launcher restarts it.
request.foreign_origin: A request comes from a web page, or is addressed to another host name.
    Send requests from a program, to the address that the server printed.
request.invalid_field: A request has a missing, unknown or invalid field.
    Correct the field that the message names; a retry with the same body fails again.
request.no_images: A request has images, and the served model takes none.
    Serve a model for images and text of a family that areal supports (docs/vision.md), or send no images.
request.no_tokenizer: A request needs a tokenizer that the server does not have, or cannot use in a stream.
    Add a tokenizer to the folder of the model, use stop_token_ids, or decode the token ids in the client.
request.not_finite: The model has no finite probabilities for the next token of a request.
    Look for the first step with an unusual loss, gradient norm or learning rate; the weights of the policy overflow.
request.not_json: The body of a request is not a JSON object.
    Send a JSON object.
request.token_id: A request has a token id outside of the vocabulary of the served model.
    Use the tokenizer of the served model, or remove the id.
request.too_large: The body of a request has more bytes than the server accepts.
    Send a shorter body: no more tokens than the context length, and smaller images; or raise agent.max_body_mb.
request.too_long: A prompt, or prompt and answer together, exceed a length limit.
    Shorten the prompt, lower gconfig.max_new_tokens, or raise the limit that the message names.
request.unauthorized: A request to a server of the run has no token or a wrong one.
    Send the token of the run as a bearer token.

reward.bad_row: A column of a row has a value that a built-in reward function cannot use.
    Correct the row or convert the column in the dataset's map_fn; docs/rewards.md lists the columns.
reward.bad_section: Two options of the section `reward`, or `reward_fn` and that section, contradict each other.
    Change the option that the message names.
reward.cannot_load: The module of a reward function raised an error at its import, or lacks the function.
    Fix the error that the message quotes.
reward.math_process_died: The process in which the reward `math` compares formulas died twice during one comparison.
    Look for a killed process (out of memory) in the log of the machine; give it more memory or lower reward.workers.
reward.missing_column: A reward function has a parameter without default for which a row has no column.
    Add the column in the dataset's map_fn, or give the parameter a default.
reward.missing_library: The reward `math` needs the library math-verify, which is not installed.
    Install it: pip install 'math-verify>=0.9'.
reward.none_given: Neither `reward_fn` nor `reward.fns` names a reward function.
    Set one of them, for example reward_fn=gsm8k.
reward.not_a_number: A reward function returned something else than a finite number, or a mapping with `score`.
    Return a number.
reward.pool_closed: An answer was to be scored after the reward processes were ended, usually because the run is ending.
    None is needed at the end of a run; otherwise look for the first error in the log.
reward.row_not_json: A row contains a value that JSON cannot represent, so it cannot be sent to a reward process.
    Convert the column that the message names in the dataset's map_fn, or remove it.
reward.unknown_source: With `reward.by_source`, a row names no data source, or one without reward functions.
    Add the source to reward.by_source, set reward.fns for all other sources, or correct reward.source_key.

rollout.all_failed: Every one of the last episodes failed, so no train batch can be composed.
    Fix the cause that the message quotes, usually in the workflow, the reward function or the data.
rollout.all_rejected: Almost every group of answers was rejected, so no train batch can be composed.
    Use prompts that the policy solves sometimes, a filter that accepts more, or a higher max_rejected_per_step.
rollout.controller_error: The rollout controller failed to serve a call of a trainer.
    Read the log of the controller.
rollout.controller_unreachable: A trainer could not reach the rollout controller for rollout.setup_timeout seconds.
    Read the log of the controller for the reason why it ended or hangs.
rollout.evaluation_failed: No row of an evaluation could be scored.
    Fix the cause that the message quotes: the workflow, the reward function or the rows of valid_dataset.
rollout.first_failed: The first three episodes of the run failed with the same error, and none succeeded.
    Fix the cause that the message quotes; areal test-workflow runs one episode.
rollout.no_such_evaluation: A trainer requested an evaluation that this run does not have.
    Configure valid_dataset and the evaluation mode, or do not request it.
rollout.not_a_share: The controller sent no batch share: it runs another version of areal than the trainer.
    Install the same version of areal on all nodes.
rollout.old_trainer: A trainer of an earlier start called the controller after the trainers were started again.
    End that process: the launcher has replaced it.
rollout.out_of_order: A call to the controller does not follow from the state of the run, so it was refused.
    Only the trainers of the run may call it; if they did, read the log of the controller.
rollout.past_the_end: A trainer requested a batch after the last train step of the run.
    Start trainer and controller with the same configuration.
rollout.stopped: The rollout controller ended with an unexpected error.
    Read the error that the message quotes and the log of the controller.
rollout.weights_needed: A server restarted or did not get its update, and only the trainer has the current weights.
    None: the trainer publishes them again and continues.

sandbox.backend_unusable: The machine cannot run programs in the way that reward.sandbox.backend names.
    Install what the message names, or choose another backend (docs/rewards.md, "The sandbox").
sandbox.not_started: The sandbox for a program did not start within 4 s.
    Check that the machine has free memory and processes, and that Python can start there.
sandbox.remote_refused: The service at reward.sandbox.url refuses a request or does not answer as SandboxFusion does.
    Check that the address is that of a SandboxFusion service, and the variable AREAL_SANDBOX_TOKEN if it needs a token.
sandbox.remote_unavailable: The service at reward.sandbox.url did not run a program, also after all repetitions.
    Start the service, give it more workers, or lower reward.workers and reward.sandbox.max_requests.

server.adapter_folder: A folder is not a LoRA adapter in the format of PEFT.
    Give a folder that has an adapter_config.json.
server.no_adapters: A request names a LoRA adapter, and this kind of server has none.
    Use sglang or vllm servers with enable_lora: true.
server.no_extension: A vLLM server that was started by hand lacks areal's worker extension.
    Start it as docs/servers.md describes.
server.request_failed: A server answered with status 5xx, or failed in the middle of an update.
    Read the log of the server.
server.request_refused: A server refused what was sent to it (status 4xx).
    Fix the cause that the server names in the message.
server.unreadable_answer: A server sent an answer that does not follow its protocol.
    Use a tested version of the server, see docs/servers.md.
server.unsupported_sampling: A sampling setting that this kind of server does not apply exactly.
    Change the setting that the message names, or use another backend.
server.wrong_backend: A server at this address does not answer like a native server.
    Name the backend of the running servers in allocation_mode.

training.not_finite: A loss, gradient or updated weight is not finite, or the weights are too large to compute with.
    Use a lower learning rate, check the model and the data. Checkpoints are from before that step.
training.stage_missing: A stage of an update reads a field that no stage added or no engine computed.
    Call the stages in the order of areal/trainer/ppo_loop.py, with engines built for their roles.

weights.bad_folder: A checkpoint folder is missing, incomplete, or does not match the served model.
    Publish the weights again, or fix the folder that the message names.
weights.do_not_fit: A weight update has names or shapes that the server's model does not have.
    Start the servers with the same model as the trainer.
weights.incomplete: A weight update lacks weights of the server's model.
    Start the servers with the same model as the trainer.
weights.invalid_bucket: A bucket of a weight update has an unknown dtype or layout.
    Use the same version of areal for trainer and servers.
weights.invalid_request: A request for a weight update has invalid fields.
    Use the same version of areal for trainer and servers.
weights.no_group: A server is not in the update group of a request.
    Initialise the group first; areal's trainer does it by itself.
weights.no_replica: No replica was alive to receive a weight update.
    Read the logs of the servers for the cause.
weights.not_finite: A weight update has numbers that are NaN or infinite.
    The server keeps its weights. Look for the step at which training diverged.
weights.not_published: Trainer rank 0 could not publish a policy version.
    Read the log of trainer-0 for the cause.
weights.not_served: A server asked trainer rank 0 for weights that it does not serve, or without the token of the run.
    Nothing, when the trainers have just started again; else start all processes with one token.
weights.not_written: A policy version could not be written to the shared folder.
    Free disk space or correct the permissions of cluster.fileroot.
weights.pull_failed: A server could not copy weights from trainer rank 0 or another server (weight_update_mode: http).
    Check the network between the machines, and the free space in TMPDIR of the servers.
weights.transfer_failed: A process did not join the update group, or did not answer in time.
    Read the logs of the servers, and check the network between trainer and servers.
weights.unexpected: The train engine yielded a weight that it did not describe before.
    Report it as a bug of the train engine.
weights.unknown_trainer: A server was asked to join an update group at an address that is not a trainer of its run.
    Set AREAL_TRAINER_ADDRESSES of servers that you start yourself to the addresses of the trainers.
weights.update_ended: The servers ended a weight update before the new version was served.
    Read the logs of controller and servers for the cause.

workflow.episode_rejected: The workflow rejected an episode of an evaluation, for example without a reward.
    Read the reason; docs/agents.md explains agent_error and no_reward.
workflow.invalid_args: workflow_args has a missing, unknown or invalid argument for the constructor of the workflow.
    Correct the argument that the message names.
workflow.loss_mask: A loss_mask has values other than 0 and 1, has no 1, or has a 1 at the first token.
    Fix the loss_mask that the workflow returns.
workflow.missing_column: A dataset row lacks a column that the workflow needs.
    Add the column to the dataset, or add it with train_dataset.map_fn.
workflow.missing_parameter: An option needs a parameter that the constructor of the workflow does not have.
    Use a built-in workflow, add the parameter, or remove the option.
workflow.no_answer: A conversation ended, or is to be scored, before the policy has answered in it.
    Call generate(episode, conversation) first.
workflow.no_evaluation: The workflow does not define for_evaluation, and the run evaluates.
    Define for_evaluation(gconfig), pass an eval_workflow to PPOTrainer.train, or remove valid_dataset.
workflow.not_a_workflow: The class or function at `workflow` does not create a RolloutWorkflow.
    Derive the class from areal.api.workflow.RolloutWorkflow.
workflow.not_finite: A workflow returned a reward, baseline or statistic that is not a finite number.
    Fix the reward function or the statistic that the message names.
workflow.output_versions: A trajectory trains on a token without the policy version that generated it.
    Copy output_versions of the response, or set loss_mask to 0 for tokens that the policy did not generate.
workflow.prompt_too_long: A prompt leaves no room for an answer within gconfig.max_tokens.
    Increase gconfig.max_tokens, or drop long rows with train_dataset.max_length.
workflow.reward_failed: A reward function failed: it raised, exceeded reward.timeout_s, or cannot be called.
    Fix the function that the message names, or set reward.on_error=zero.
workflow.reward_timeout: reward.timeout_s is shorter than the time limit of the tests of a row.
    Increase reward.timeout_s, lower the column total_time_limit_s, or set reward.on_error=zero.
workflow.rollout_logprobs: A value is not a log-probability, or is not 0.0 where loss_mask is 0.
    Copy output_logprobs of the response and use 0.0 for all other tokens.
workflow.session_rewards: Rows of one session have different rewards.
    Give all rows the reward of the session, and rewards of turns as turn_rewards.
workflow.trajectory_lengths: A workflow returned an empty group or trajectory, or columns of different lengths.
    Return one value per token in each column, one filter_reward per trajectory, or None to reject the episode.
workflow.wrong_reward: The method converse of a workflow returned something else than a Score or a number.
    Return the result of score(episode, conversation), or a number.
workflow.wrong_type: A trajectory holds a value of the wrong type or outside the range of its column.
    Fix the types of the trajectory that the workflow returns.
"""
"""For each code two lines: `code: cause`, then the fix, indented. Sorted within each area."""


@dataclass(frozen=True, slots=True)
class ErrorCode:
    """What a user or a maintainer needs to know about one code."""

    cause: str
    fix: str


def _parsed(table: str) -> dict[str, ErrorCode]:
    lines = [line.strip() for line in table.splitlines() if line]
    codes: dict[str, ErrorCode] = {}
    for first, fix in zip(lines[::2], lines[1::2], strict=True):
        code, _, cause = first.partition(": ")
        codes[code] = ErrorCode(cause, fix)
    return codes


def _of_alarms() -> dict[str, ErrorCode]:
    """The codes of runs that an alarm ended."""
    return {
        rule.code: ErrorCode(f"{rule.meaning[0].upper()}{rule.meaning[1:]}.", f"Look at: {rule.look_at}.")
        for rule in ALARM_RULES
    }


ERROR_CODES: dict[str, ErrorCode] = _of_alarms() | _parsed(_TABLE)


_PAGE_HEAD = """# Errors

Every error that areal raises on purpose has a code, such as `config.unknown_key`. A code keeps its meaning across
releases: programs and tests compare the code (`error.code`), people read the message, which names the option, file or
process and its value. Commands print the code in brackets after the message. An error without a code in this list is
a defect of areal.

This page is generated from `areal/api/error_codes.py` by `make docs`.
"""


def errors_page() -> str:
    """The text of `docs/errors.md`: one table for each area."""
    parts = [_PAGE_HEAD]
    for area, codes in itertools.groupby(ERROR_CODES, key=lambda code: code.partition(".")[0]):
        parts.append(f"\n## {area}\n\n| code | cause | fix |\n|---|---|---|\n")
        parts += [f"| `{code}` | {ERROR_CODES[code].cause} | {ERROR_CODES[code].fix} |\n" for code in codes]
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(errors_page())
