"""The methods that can be run and compared, one registry."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pecil import PEC, WhitenedPEC
from pecil.methods.agem import AGEM
from pecil.methods.ar1 import AR1
from pecil.methods.bic import BiC
from pecil.methods.cwr import CWR
from pecil.methods.der import DER, DERpp
from pecil.methods.dgr import DGR
from pecil.methods.ensemble import Ensemble
from pecil.methods.er import ER
from pecil.methods.er_ace import ERACE
from pecil.methods.ewc import EWC
from pecil.methods.finetuning import FineTuning
from pecil.methods.icarl import ICaRL
from pecil.methods.joint import Joint
from pecil.methods.learner import Learner, Rehearser, check_settings
from pecil.methods.lwf import LwF
from pecil.methods.nearest_mean import NearestMean
from pecil.methods.pec import PECLearner
from pecil.methods.si import SI
from pecil.methods.slda import SLDA
from pecil.methods.trained import Replaying, Trained
from pecil.methods.vae_gc import VAEGC
from pecil.methods.whitened import RECIPE_SETTINGS, RanDumb, WhitenedLearner, whitened_pec
from pecil.methods.xder import XDER

__all__ = [
    "AGEM",
    "AR1",
    "CWR",
    "DER",
    "DGR",
    "ER",
    "ERACE",
    "EWC",
    "METHODS",
    "SI",
    "SLDA",
    "VAEGC",
    "XDER",
    "BiC",
    "DERpp",
    "Ensemble",
    "FineTuning",
    "ICaRL",
    "Joint",
    "Learner",
    "LwF",
    "Method",
    "NearestMean",
    "PECLearner",
    "RanDumb",
    "Rehearser",
    "Trained",
    "WhitenedLearner",
    "check_settings",
    "whitened_pec",
]

NOT_CHOSEN = {  # given by the dataset, the stream, the experiment or the machine
    *("n_classes", "input_shape", "mean", "std", "channels", "expected_samples", "shuffle"),
    *("expected_classes", "seed", "random_state", "device", "epochs", "buffer"),
}


def any_shape(input_shape: Sequence[int]) -> bool:
    """Say that samples of every shape will do."""
    return True


@dataclass(frozen=True)
class Method:
    """A method's entry in the registry.

    Examples
    --------
    >>> METHODS["slda"].settings
    ('shrinkage', 'size')
    """

    name: str
    title: str
    reference: str
    description: str
    learner: Callable[..., Learner]
    """Makes a learner from n_classes, input_shape, mean, std, seed, device and settings."""
    options: tuple[str, ...]
    """What can be said of it by name, in a file or on a command line."""
    buffer: bool = False
    """Does it keep samples to replay them? Then its learner is a `Rehearser`."""
    independent: bool = False
    """Is the model the same in whatever portions the stream is handed over?"""
    by_task: bool = False
    """Is it handed each pass over a task as a whole, to cut it into batches itself?"""
    revisits: bool = False
    """Does it go over a task's samples again when the task ends, and hold them until then?"""
    again: bool = False
    """Does it take the samples of several passes once, and the order in which they come again?"""
    joint: bool = False
    """Are all classes one task?"""
    supports: Callable[[Sequence[int]], bool] = any_shape
    """Says whether it can learn samples of a shape, and so which datasets."""
    of_dataset: Mapping[str, str] = field(default_factory=dict)
    """Settings that a dataset decides, with the field of its `DatasetInfo` that does."""

    @property
    def settings(self) -> tuple[str, ...]:
        """The names of the settings of an experiment."""
        stream = () if self.independent or self.by_task else ("batch_size",)
        return (*(name for name in self.options if name not in NOT_CHOSEN), *stream)


def _parameters(owner: Callable[..., Any], but: str = "") -> tuple[str, ...]:
    """Return the names of a class's own parameters."""
    return tuple(
        name
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD and name != but
    )


def _trained(
    name: str,
    title: str,
    reference: str,
    description: str,
    learner: Callable[..., Learner],
    without: Sequence[str] = (),
    **about: Any,
) -> Method:
    """Describe a method that trains a network; see `pecil.methods.trained`.

    ``without`` are settings of these that mean nothing to it.
    """
    base = Replaying if about.get("buffer") else Trained
    options = dict.fromkeys((*_parameters(Trained), *_parameters(base), *_parameters(learner)))
    return Method(
        name,
        title,
        reference,
        description,
        learner,
        tuple(name for name in options if name not in without),
        by_task=True,
        of_dataset={"flip": "mirror"},
        **about,
    )


METHODS = {
    method.name: method
    for method in (
        Method(
            name="whitened_pec",
            title="Whitened PEC",
            reference="Zając, Tuytelaars and van de Ven (2024), with closed-form students and "
            "the error in its own metric: see pecil.WhitenedPEC.",
            description="The mean of what a frozen teacher says of a class is its student; "
            "the smallest error, whitened by a shared covariance, names the class.",
            learner=WhitenedLearner,
            options=(*_parameters(WhitenedPEC), *RECIPE_SETTINGS),
            independent=True,
            of_dataset={"teacher": "pictures"},
        ),
        Method(
            name="pec",
            title="PEC",
            reference="Zając, Tuytelaars and van de Ven (2024). Prediction Error-based "
            "Classification for Class-Incremental Learning. ICLR.",
            description="One student per class imitates a frozen random teacher; "
            "the student with the smallest error names the class.",
            learner=PECLearner,
            options=(
                *_parameters(PEC, but="teacher"),  # which is a callable
                *("balancing", "size"),
            ),
            independent=True,
            again=True,
        ),
        Method(
            name="randumb",
            title="RanDumb",
            reference="Prabhu, Sinha, Kumaraguru, Torr, Sener and Dokania (2024). Random "
            "Representations Outperform Online Continually Learned Representations. NeurIPS.",
            description="Means and shared covariance of random Fourier features of the pixels.",
            learner=RanDumb,
            options=_parameters(RanDumb),
            independent=True,
            of_dataset={"flip": "mirror"},
        ),
        Method(
            name="slda",
            title="SLDA",
            reference="Hayes and Kanan (2020). Lifelong Machine Learning with Deep Streaming "
            "Linear Discriminant Analysis. CVPR Workshops.",
            description="Means of the pixels; the nearest one, in the metric of their shared "
            "covariance, names the class.",
            learner=SLDA,
            options=_parameters(SLDA),
            independent=True,
        ),
        Method(
            name="nearest_mean",
            title="Nearest mean",
            reference="Mensink, Verbeek, Perronnin and Csurka (2013). Distance-Based Image "
            "Classification: Generalizing to New Classes at Near-Zero Cost. TPAMI 35.",
            description="Means of the pixels; the nearest one names the class.",
            learner=NearestMean,
            options=_parameters(NearestMean),
            independent=True,
        ),
        _trained(
            "finetuning",
            "Fine-tuning",
            "McCloskey and Cohen (1989). Catastrophic Interference in Connectionist Networks. "
            "Psychology of Learning and Motivation 24.",
            "A network trained on the stream as it comes; forgets. The lower end.",
            FineTuning,
        ),
        _trained(
            "joint",
            "Joint",
            "Caruana (1997). Multitask Learning. Machine Learning 28.",
            "The network of fine-tuning, trained on all classes at once. The upper end.",
            Joint,
            joint=True,
        ),
        _trained(
            "er",
            "ER",
            "Chaudhry et al. (2019). On Tiny Episodic Memories in Continual Learning. arXiv.",
            "Every step is taken on new samples and on as many old ones from a buffer.",
            ER,
            buffer=True,
        ),
        _trained(
            "agem",
            "A-GEM",
            "Chaudhry, Ranzato, Rohrbach and Elhoseiny (2019). Efficient Lifelong Learning with "
            "A-GEM. ICLR.",
            "Gradients that would make a batch of old samples worse are turned until they do not.",
            AGEM,
            buffer=True,
        ),
        _trained(
            "der",
            "DER",
            "Buzzega, Boschini, Porrello, Abati and Calderara (2020). Dark Experience for General "
            "Continual Learning. NeurIPS.",
            "Old samples are kept with what the network said of them, and it is held to that.",
            DER,
            buffer=True,
        ),
        _trained(
            "derpp",
            "DER++",
            "Buzzega, Boschini, Porrello, Abati and Calderara (2020). Dark Experience for General "
            "Continual Learning. NeurIPS.",
            "DER, which is held to the labels of old samples as well.",
            DERpp,
            buffer=True,
        ),
        _trained(
            "xder",
            "X-DER",
            "Boschini, Bonicelli, Buzzega, Porrello and Calderara (2022). Class-Incremental "
            "Continual Learning into the eXtended DER-verse. TPAMI.",
            "DER++ whose memories are brought up to date and whose future heads are prepared.",
            XDER,
            buffer=True,
            revisits=True,
        ),
        _trained(
            "er_ace",
            "ER-ACE",
            "Caccia, Aljundi, Asadi, Tuytelaars, Pineau and Belilovsky (2022). New Insights on "
            "Reducing Abrupt Representation Change in Online Continual Learning. ICLR.",
            "Replay in which new samples compete with no class of earlier tasks.",
            ERACE,
            buffer=True,
        ),
        _trained(
            "icarl",
            "iCaRL",
            "Rebuffi, Kolesnikov, Sperl and Lampert (2017). iCaRL: Incremental Classifier and "
            "Representation Learning. CVPR.",
            "Chosen samples of each class; the nearest mean of their features names the class.",
            ICaRL,
            buffer=True,
            revisits=True,
        ),
        _trained(
            "bic",
            "BiC",
            "Wu, Chen, Wang, Ye, Liu, Guo and Fu (2019). Large Scale Incremental Learning. CVPR.",
            "Replay and distillation; two numbers per task undo the bias towards new classes.",
            BiC,
            buffer=True,
            revisits=True,
        ),
        _trained(
            "ewc",
            "EWC",
            "Kirkpatrick et al. (2017). Overcoming catastrophic forgetting in neural networks. "
            "PNAS 114.",
            "Weights that mattered to earlier tasks are held where they were.",
            EWC,
            revisits=True,
        ),
        _trained(
            "si",
            "SI",
            "Zenke, Poole and Ganguli (2017). Continual Learning Through Synaptic Intelligence. "
            "ICML.",
            "As EWC; what a weight matters is summed up along the way.",
            SI,
        ),
        _trained(
            "lwf",
            "LwF",
            "Li and Hoiem (2018). Learning without Forgetting. TPAMI 40.",
            "On new samples the network is held to what it said before of old classes.",
            LwF,
        ),
        _trained(
            "cwr",
            "CWR",
            "Lomonaco and Maltoni (2017). CORe50: a New Dataset and Benchmark for Continuous "
            "Object Recognition. CoRL.",
            "Output weights are learned afresh for each task, and copied away when it ends.",
            CWR,
        ),
        _trained(
            "ar1",
            "AR1",
            "Maltoni and Lomonaco (2019). Continuous learning in single-incremental-task "
            "scenarios. Neural Networks 116.",
            "CWR+ for the output weights, SI for the layers below.",
            AR1,
        ),
        _trained(
            "dgr",
            "DGR",
            "Shin, Lee, Kim and Kim (2017). Continual Learning with Deep Generative Replay. "
            "NeurIPS.",
            "Old samples are made up by a generator, and named by the network as it was.",
            DGR,
        ),
        _trained(
            "vae_gc",
            "VAE-GC",
            "Van de Ven, Li and Tolias (2021). Class-Incremental Learning with Generative "
            "Classifiers. CVPR Workshops.",
            "A variational autoencoder per class; the likeliest one names the class.",
            VAEGC,
            without=("init", "keep_adam"),
        ),
        _trained(
            "ensemble",
            "Ensemble",
            "Zając, Tuytelaars and van de Ven (2024). Prediction Error-based Classification for "
            "Class-Incremental Learning. ICLR.",
            "A network for each task; the largest output of all names the class.",
            Ensemble,
        ),
    )
}
